// Operators that a GPU has and the CPU has not, or that take more there. Their results are those
// that PyTorch documents, computed by other operators of the device.
#include "kernels.h"
#include <ATen/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

namespace emulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// --- softmax: halves in, floats out, and the reverse for gradients
// --------------------------------

using Softmax = Tensor (*)(const Tensor&, int64_t, bool);
using SoftmaxBackward = Tensor (*)(const Tensor&, const Tensor&, int64_t, at::ScalarType);

template <Softmax kernel>
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  const Tensor wide = half_to_float ? self.to(at::kFloat) : self;
  return on_cpu([dim](const Tensor& x) { return kernel(x, dim, false); }, wide);
}

template <SoftmaxBackward kernel>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,
                        at::ScalarType input_type) {
  const auto run = [dim, type = grad.scalar_type()](const Tensor& g, const Tensor& y) {
    return kernel(g, y, dim, type);
  };
  return on_cpu(run, grad, output).to(input_type);
}

template <Softmax kernel>
Tensor& softmax_out(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out) {
  const Tensor result = softmax<kernel>(self, dim, half_to_float);
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

template <SoftmaxBackward kernel>
Tensor& softmax_backward_out(const Tensor& grad, const Tensor& output, int64_t dim,
                             at::ScalarType input_type, Tensor& out) {
  const Tensor result = softmax_backward<kernel>(grad, output, dim, input_type);
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

// --- products of halves with results in float
// -----------------------------------------------------

Tensor mm_wide(const Tensor& a, const Tensor& b, at::ScalarType type) {
  return at::mm(a.to(type), b.to(type));
}
Tensor bmm_wide(const Tensor& a, const Tensor& b, at::ScalarType type) {
  return at::bmm(a.to(type), b.to(type));
}
Tensor addmm_wide(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type,
                  const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(self.to(type), a.to(type), b.to(type), beta, alpha);
}
Tensor& addmm_wide_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type,
                       const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return out.copy_(addmm_wide(self, a, b, type, beta, alpha));
}
Tensor baddbmm_wide(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type,
                    const at::Scalar& beta, const at::Scalar& alpha) {
  return at::baddbmm(self.to(type), a.to(type), b.to(type), beta, alpha);
}

// --- recurrent cells
// ------------------------------------------------------------------------------

Tensor wide(const Tensor& x) {
  return at::isReducedFloatingType(x.scalar_type()) ? x.to(at::kFloat) : x;
}
Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? wide(gates) + wide(*bias) : wide(gates);
}
Tensor or_zeros(const MaybeTensor& grad, const Tensor& like) {
  return grad && grad->defined() ? wide(*grad) : at::zeros_like(like);
}

// The workspace has the gates, behind their activations: input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const auto gates =
      (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor i = at::sigmoid(gates[0]), f = at::sigmoid(gates[1]), g = at::tanh(gates[2]),
               o = at::sigmoid(gates[3]);
  const Tensor cy = f * wide(cx) + i * g, hy = o * at::tanh(cy);
  const at::ScalarType type = cx.scalar_type();
  return {hy.to(type), cy.to(type), at::cat({i, f, g, o}, 1).to(type)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy,
                                                      const MaybeTensor& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!(grad_hy && grad_hy->defined()) && !(grad_cy && grad_cy->defined())) return {};
  const auto gates = wide(workspace).chunk(4, 1);
  const Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const Tensor c = at::tanh(wide(cy)), grad_h = or_zeros(grad_hy, c);
  const Tensor grad_c = grad_h * o * (1 - c * c) + or_zeros(grad_cy, c);
  const Tensor grad = at::cat({grad_c * g * i * (1 - i), grad_c * wide(cx) * f * (1 - f),
                               grad_c * i * (1 - g * g), grad_h * c * o * (1 - o)},
                              1)
                          .to(workspace.scalar_type());
  return {grad, (grad_c * f).to(cx.scalar_type()), has_bias ? grad.sum(0) : Tensor()};
}

// The workspace has reset, update and new gate, the old state, and what the reset gate multiplies.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = at::sigmoid(in[0] + hidden[0]), update = at::sigmoid(in[1] + hidden[1]);
  const Tensor next = at::tanh(in[2] + reset * hidden[2]), h = wide(hx);
  const Tensor hy = next + update * (h - next);
  const at::ScalarType type = hx.scalar_type();
  return {hy.to(type), at::cat({reset, update, next, h, hidden[2]}, 1).to(type)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = wide(workspace).chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &next = saved[2], &h = saved[3],
               &hidden = saved[4];
  const Tensor grad = wide(grad_hy);
  const Tensor grad_update = grad * (h - next) * (1 - update) * update;
  const Tensor grad_next = grad * (1 - update) * (1 - next * next);
  const Tensor grad_reset = grad_next * hidden * (1 - reset) * reset;
  const at::ScalarType type = workspace.scalar_type();
  const Tensor grad_input = at::cat({grad_reset, grad_update, grad_next}, 1).to(type);
  const Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_next * reset}, 1).to(type);
  return {grad_input, grad_hidden, (grad * update).to(type),
          has_bias ? grad_input.sum(0) : Tensor(), has_bias ? grad_hidden.sum(0) : Tensor()};
}

// --- RMS norm
// -------------------------------------------------------------------------------------

std::vector<int64_t> last_dims(const Tensor& x, at::IntArrayRef shape) {
  std::vector<int64_t> dims;
  for (int64_t dim = x.dim() - static_cast<int64_t>(shape.size()); dim < x.dim(); ++dim) {
    dims.push_back(dim);
  }
  return dims;
}
Tensor weighted(const Tensor& x, const MaybeTensor& weight) {
  return weight && weight->defined() ? x * wide(*weight) : x;
}

// A GPU's kernel computes in float, rounds the result once, and keeps the factors of rows in float.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape,
                                    const MaybeTensor& weight, std::optional<double> epsilon) {
  const Tensor x = wide(input).contiguous();
  const double least = x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                      : std::numeric_limits<float>::epsilon();
  const Tensor rstd =
      at::rsqrt(at::mean(x * x, last_dims(x, shape), /*keepdim=*/true) + epsilon.value_or(least));
  return {weighted(x * rstd, weight).to(input.scalar_type()), rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                             at::IntArrayRef shape, const Tensor& rstd,
                                             const MaybeTensor& weight,
                                             std::array<bool, 2> wanted) {
  const Tensor grad = wide(grad_out).contiguous(), normal = wide(input).contiguous() * rstd;
  Tensor of_input, of_weight;
  if (wanted[0]) {
    const Tensor scaled = weighted(grad, weight);
    const Tensor along = at::mean(scaled * normal, last_dims(input, shape), /*keepdim=*/true);
    of_input = ((scaled - normal * along) * rstd).to(input.scalar_type());
  }
  if (wanted[1]) {
    std::vector<int64_t> columns(shape.begin(), shape.end());
    columns.insert(columns.begin(), -1);
    if (normal.numel() == 0) columns[0] = 0;
    of_weight = (grad * normal).view(columns).sum(0).to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

// --- dropout
// --------------------------------------------------------------------------------------

// Unlike the CPU's it draws nothing where all is dropped. A GPU's kernel takes its random numbers
// in another order than bernoulli_ does, and which one depends on the dtype.
std::tuple<Tensor, Tensor> dropout(const Tensor& self, double p, std::optional<bool> train) {
  const auto mask_options = self.options().dtype(at::kBool);
  if (train && !*train) return {self.clone(), at::ones_like(self, mask_options)};
  if (p == 1) return {at::zeros_like(self), at::zeros_like(self, mask_options)};
  const Tensor mask = at::empty_like(self, mask_options);
  Tensor drawn = at::empty(self.numel(), mask_options).bernoulli_(1 - p).flip(0);
  if (self.element_size() < 4) drawn = drawn.roll(1);
  mask.as_strided(drawn.sizes(), {1}, mask.storage_offset()).copy_(drawn);
  return {self * mask * (1 / (1 - p)), mask};
}

// --- convolutions of one channel each
// -------------------------------------------------------------

void check_no_capture() {
  TORCH_CHECK(!is_recording(), "emulated device: no graphs of convolutions of one channel each");
}

Tensor depthwise(const Tensor& self, const Tensor& weight, c10::SymIntArrayRef,
                 const MaybeTensor& bias, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                 c10::SymIntArrayRef dilation) {
  check_no_capture();
  const auto run = [&](const Tensor& x, const Tensor& w, const Tensor& b) {
    return at::convolution_symint(x, w, b, stride, padding, dilation, /*transposed=*/false,
                                  std::vector<c10::SymInt>{0, 0}, x.sym_size(1));
  };
  return on_cpu(run, self, weight, bias.value_or(Tensor()));
}

std::tuple<Tensor, Tensor> depthwise_backward(const Tensor& grad, const Tensor& self,
                                              const Tensor& weight, at::IntArrayRef,
                                              at::IntArrayRef stride, at::IntArrayRef padding,
                                              at::IntArrayRef dilation,
                                              std::array<bool, 2> wanted) {
  check_no_capture();
  CpuView view;
  const auto [of_self, of_weight, none] = at::convolution_backward(
      view.to_cpu(grad), view.to_cpu(self), view.to_cpu(weight), at::OptionalIntArrayRef(), stride,
      padding, dilation, /*transposed=*/false, {0, 0}, self.size(1), {wanted[0], wanted[1], false});
  return {view.to_device(of_self), view.to_device(of_weight)};
}

}  // namespace

void register_gpu_kernels(torch::Library& library) {
  library.impl("_softmax", &softmax<&at::_softmax>);
  library.impl("_log_softmax", &softmax<&at::_log_softmax>);
  library.impl("_softmax_backward_data", &softmax_backward<&at::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data", &softmax_backward<&at::_log_softmax_backward_data>);
  library.impl("_softmax.out", &softmax_out<&at::_softmax>);
  library.impl("_log_softmax.out", &softmax_out<&at::_log_softmax>);
  library.impl("_softmax_backward_data.out", &softmax_backward_out<&at::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data.out",
               &softmax_backward_out<&at::_log_softmax_backward_data>);
  library.impl("mm.dtype", &mm_wide);
  library.impl("bmm.dtype", &bmm_wide);
  library.impl("addmm.dtype", &addmm_wide);
  library.impl("addmm.dtype_out", &addmm_wide_out);
  library.impl("baddbmm.dtype", &baddbmm_wide);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  library.impl("_fused_rms_norm", &rms_norm);
  library.impl("_fused_rms_norm_backward", &rms_norm_backward);
  library.impl("native_dropout", &dropout);
  library.impl("_conv_depthwise2d", &depthwise);
  at::native::conv_depthwise2d_backward_stub.set_cuda_dispatch_ptr(&depthwise_backward);
}

}  // namespace emulated
