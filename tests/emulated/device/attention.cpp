// Flash, cuDNN and memory-efficient attention as PyTorch has them on a GPU, with their choice,
// layouts of results and seeds of dropout; the numbers are computed in float32 from the formula of
// attention.
#include "generator.h"
#include "kernels.h"
#include <ATen/Context.h>
#include <ATen/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

namespace emulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kLargestHead = 256;
constexpr int64_t kEfficientRows = 32;  // the rows of log-sums are padded to a multiple

// --- the formula
// ----------------------------------------------------------------------------------

struct Attention {
  Tensor probabilities;  // before dropout
  Tensor dropout;        // what they are multiplied by; undefined without dropout
  Tensor log_sums;
  double scale;
};

// Numbers that a seed alone tells, as Philox gives them to both directions.
Tensor dropout_factors(const Tensor& like, double p, uint64_t seed) {
  at::Generator generator = make_generator(seed);
  const Tensor kept = at::rand(like.sizes(), generator, like.options()).ge(p);
  return kept.to(like.scalar_type()) / (1 - p);
}

Attention attend(const Tensor& query, const Tensor& key, const MaybeTensor& bias, double dropout_p,
                 bool is_causal, std::optional<double> scale, uint64_t seed) {
  Attention made;
  made.scale = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  Tensor scores = at::matmul(query.to(at::kFloat), key.to(at::kFloat).transpose(2, 3)) * made.scale;
  if (bias && bias->defined()) scores = scores + bias->to(at::kFloat);
  if (is_causal) {
    const Tensor seen =
        at::ones({scores.size(2), scores.size(3)}, scores.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }
  made.log_sums = at::logsumexp(scores, 3);
  made.probabilities = at::exp(scores - made.log_sums.unsqueeze(3));
  if (dropout_p > 0) made.dropout = dropout_factors(scores, dropout_p, seed);
  return made;
}

Tensor times_dropout(const Attention& a, const Tensor& x) {
  return a.dropout.defined() ? x * a.dropout : x;
}

struct Gradients {
  Tensor query, key, value, bias;
};

Gradients attend_backward(const Attention& a, const Tensor& grad_out, const Tensor& query,
                          const Tensor& key, const Tensor& value) {
  const Tensor grad = grad_out.to(at::kFloat);
  const Tensor grad_value = at::matmul(times_dropout(a, a.probabilities).transpose(2, 3), grad);
  const Tensor grad_p = times_dropout(a, at::matmul(grad, value.to(at::kFloat).transpose(2, 3)));
  const Tensor weighted = grad_p * a.probabilities;
  const Tensor grad_scores = weighted - a.probabilities * weighted.sum(3, /*keepdim=*/true);
  return {(at::matmul(grad_scores, key.to(at::kFloat)) * a.scale).to(query.scalar_type()),
          (at::matmul(grad_scores.transpose(2, 3), query.to(at::kFloat)) * a.scale)
              .to(key.scalar_type()),
          grad_value.to(value.scalar_type()), grad_scores};
}

// [batch, heads, rows, head] in memory as [batch, rows, heads, head].
Tensor rows_before_heads(const Tensor& x) { return x.transpose(1, 2).contiguous().transpose(1, 2); }

// --- flash
// ----------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p, bool is_causal,
    bool, std::optional<double> scale) {
  TORCH_CHECK(at::isReducedFloatingType(query.scalar_type()),
              "FlashAttention only support fp16 and bf16 data type");
  const auto seed = dropout_p > 0 ? static_cast<int64_t>(next_stream(default_generator())) : 0;
  const Attention a = attend(query, key, {}, dropout_p, is_causal, scale, seed);
  const Tensor out = at::empty_like(query);
  out.copy_(at::matmul(times_dropout(a, a.probabilities), value.to(at::kFloat)));
  const at::TensorOptions numbers = query.options().dtype(at::kUInt64);
  const Tensor state = at::empty({2}, numbers);
  state.view(at::kLong).copy_(at::tensor({seed, int64_t{0}}));
  return {out,
          a.log_sums,
          Tensor(),
          Tensor(),
          query.sym_size(2),
          key.sym_size(2),
          state,
          at::empty({}, numbers),
          at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad_out, const Tensor& query,
                                                  const Tensor& key, const Tensor& value,
                                                  const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, c10::SymInt, c10::SymInt,
                                                  double dropout_p, bool is_causal,
                                                  const Tensor& philox_seed, const Tensor&,
                                                  std::optional<double> scale) {
  const uint64_t seed = dropout_p > 0 ? philox_seed.view(at::kLong)[0].item<int64_t>() : 0;
  const Attention a = attend(query, key, {}, dropout_p, is_causal, scale, seed);
  const Gradients made = attend_backward(a, grad_out, query, key, value);
  return {at::empty_like(query).copy_(made.query), at::empty_like(key).copy_(made.key),
          at::empty_like(value).copy_(made.value)};
}

// --- cuDNN
// ----------------------------------------------------------------------------------------

// Without a mask. As on GPUs, the seed is on the device, and a mask of dropout is another one than
// that of other kernels.
uint64_t seed_of_cudnn(int64_t seed) { return ~static_cast<uint64_t>(seed); }

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn(
    const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias,
    bool with_sums, double dropout_p, bool is_causal, bool, std::optional<double> scale) {
  TORCH_CHECK(!bias, "emulated device: cuDNN attention with a mask");
  const auto seed = dropout_p > 0 ? static_cast<int64_t>(next_stream(default_generator())) : 0;
  const Attention a = attend(query, key, {}, dropout_p, is_causal, scale, seed_of_cudnn(seed));
  const Tensor out = at::empty_like(query);
  out.copy_(at::matmul(times_dropout(a, a.probabilities), value.to(at::kFloat)));
  const Tensor state = at::empty({}, query.options().dtype(at::kLong)).fill_(seed);
  const Tensor sums = with_sums ? a.log_sums.unsqueeze(3) : Tensor();
  return {out,
          sums,
          Tensor(),
          Tensor(),
          query.sym_size(2),
          key.sym_size(2),
          state,
          at::empty_like(state),
          Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& grad_out, const Tensor& query,
                                                  const Tensor& key, const Tensor& value,
                                                  const Tensor&, const Tensor&,
                                                  const Tensor& philox_seed, const Tensor&,
                                                  const Tensor&, const Tensor&, const Tensor&,
                                                  c10::SymInt, c10::SymInt, double dropout_p,
                                                  bool is_causal, std::optional<double> scale) {
  const int64_t seed = dropout_p > 0 ? philox_seed.item<int64_t>() : 0;
  const Attention a = attend(query, key, {}, dropout_p, is_causal, scale, seed_of_cudnn(seed));
  const Gradients made = attend_backward(a, grad_out, query, key, value);
  return {at::empty_like(query).copy_(made.query), at::empty_like(key).copy_(made.key),
          at::empty_like(value).copy_(made.value)};
}

// --- memory-efficient
// -----------------------------------------------------------------------------

// A GPU's kernel reads several elements of a row of the bias at once.
void check_aligned(const Tensor& bias, const Tensor& query, const Tensor& key, int64_t together) {
  const Tensor whole = bias.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
  for (int64_t dim = 0; dim < 3; ++dim) {
    TORCH_CHECK(whole.size(dim) <= 1 || whole.stride(dim) % together == 0,
                "attn_bias is not correctly aligned (stride", "BHM"[dim], "). attn_bias.stride(",
                dim, ") = ", whole.stride(dim), ", and should be a multiple of ", together, ".");
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const MaybeTensor& bias,
                                                     bool compute_log_sums, double dropout_p,
                                                     bool is_causal, std::optional<double> scale) {
  const int64_t together = at::isReducedFloatingType(query.scalar_type()) ? 8 : 4;
  if (bias && bias->defined()) check_aligned(*bias, query, key, together);
  const auto seed = dropout_p > 0 ? static_cast<int64_t>(next_stream(default_generator())) : 0;
  const Attention a = attend(query, key, bias, dropout_p, is_causal, scale, seed);
  const Tensor out = at::matmul(times_dropout(a, a.probabilities), value.to(at::kFloat));
  const int64_t rows = query.size(2);
  const int64_t padded = (rows + kEfficientRows - 1) / kEfficientRows * kEfficientRows;
  const Tensor log_sums = at::empty({query.size(0), query.size(1), compute_log_sums ? padded : 0},
                                    a.log_sums.options());
  if (compute_log_sums) log_sums.narrow(2, 0, rows).copy_(a.log_sums);
  // Both are of the CPU where dropout draws, outside of the capture of a graph.
  const auto numbers = at::TensorOptions().dtype(at::kLong);
  const auto none = at::empty({}, numbers.device(query.device()));
  return {rows_before_heads(out.to(query.scalar_type())), log_sums,
          dropout_p > 0 ? at::scalar_tensor(seed, numbers) : none,
          dropout_p > 0 ? at::scalar_tensor(0, numbers) : none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, const Tensor&, const Tensor&, const Tensor& philox_seed, const Tensor&,
    double dropout_p, std::array<bool, 4> wanted, bool is_causal, std::optional<double> scale) {
  if (!grad_out.defined()) return {};
  if (bias.defined()) check_aligned(bias, query, key, 4);
  // PyTorch's kernel dereferences its address on the host.
  TORCH_CHECK(dropout_p == 0 || philox_seed.device().is_cpu(), "the seed is on ",
              philox_seed.device(), ", want the host");
  const uint64_t seed = dropout_p > 0 ? philox_seed.item<int64_t>() : 0;
  const Attention a = attend(query, key, bias, dropout_p, is_causal, scale, seed);
  const Gradients made = attend_backward(a, grad_out, query, key, value);
  const Tensor of_bias = bias.defined() && wanted[3]
                             ? made.bias.sum_to_size(bias.sizes()).to(bias.scalar_type())
                             : Tensor();
  if (query.storage().is_alias_of(key.storage()) && query.storage().is_alias_of(value.storage()) &&
      query.sizes() == key.sizes() && key.sizes() == value.sizes()) {
    // Three parts of one product: so are their gradients, [batch, rows, 3, heads, head].
    const Tensor together =
        at::stack({made.query, made.key, made.value}).permute({1, 3, 0, 2, 4}).contiguous();
    const auto part = [&](int64_t i) { return together.select(2, i).transpose(1, 2); };
    return {part(0), part(1), part(2), of_bias};
  }
  return {rows_before_heads(made.query), rows_before_heads(made.key), rows_before_heads(made.value),
          of_bias};
}

// --- the choice
// -----------------------------------------------------------------------------------

// Sizes may be symbols: a trace asks too.
bool is_plain(const Tensor& x) {
  return x.dim() == 4 && x.sym_numel() > 0 && x.sym_stride(3) == 1 && x.sym_size(3) <= kLargestHead;
}

struct Call {
  const Tensor &query, &key, &value;
  bool has_mask, is_causal, is_half, is_plain;
};

bool runs_flash(const Call& call) {
  return call.is_plain && call.is_half && !call.has_mask &&
         at::globalContext().userEnabledFlashSDP() &&
         call.query.sym_size(3) == call.value.sym_size(3) && call.query.sym_size(3) % 8 == 0 &&
         !(call.is_causal && call.query.sym_size(2) != call.key.sym_size(2));
}

bool runs_cudnn(const Call& call) {
  return call.is_plain && call.is_half && !call.has_mask &&
         at::globalContext().userEnabledCuDNNSDP() &&
         call.query.sym_size(3) == call.value.sym_size(3) && call.query.sym_size(3) % 8 == 0;
}

bool runs_efficient(const Call& call) {
  const int64_t together = call.is_half ? 8 : 4;  // rows of 16 bytes
  return call.is_plain && (call.is_half || call.query.scalar_type() == at::kFloat) &&
         at::globalContext().userEnabledMemEfficientSDP() &&
         call.query.sym_size(3) % together == 0 && call.value.sym_size(3) % together == 0;
}

// The first that can, in the order that PyTorch or its user has set. PyTorch puts cuDNN behind all
// others, but for some GPUs.
int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
               double, bool is_causal, std::optional<double>, bool) {
  const bool plain = is_plain(query) && is_plain(key) && is_plain(value) &&
                     query.sym_size(1) == key.sym_size(1) && key.sym_size(1) == value.sym_size(1) &&
                     query.sym_size(0) == key.sym_size(0);
  const bool half = at::isReducedFloatingType(query.scalar_type());
  const bool has_mask = mask && mask->defined();
  const Call call{query, key, value, has_mask, is_causal, half, plain};
  for (const sdp::SDPBackend each : at::globalContext().sDPPriorityOrder()) {
    const bool can = (each == sdp::SDPBackend::flash_attention && runs_flash(call)) ||
                     (each == sdp::SDPBackend::cudnn_attention && runs_cudnn(call)) ||
                     (each == sdp::SDPBackend::efficient_attention && runs_efficient(call)) ||
                     (each == sdp::SDPBackend::math && at::globalContext().userEnabledMathSDP());
    if (can) return static_cast<int64_t>(each);
  }
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

void register_attention(torch::Library& library) {
  library.impl("_fused_sdp_choice", &choose);
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_scaled_dot_product_cudnn_attention", &cudnn);
  library.impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
}

}  // namespace emulated
