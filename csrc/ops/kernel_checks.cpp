#include "ops/kernel_checks.h"

#include "base/error.h"
#include "ops/op.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/aminmax.h>
#include <c10/util/accumulate.h>

#include <initializer_list>
#include <string>
#include <string_view>

namespace torch_ort::ops {

using Stack = std::vector<c10::IValue>;

class KernelCall {
 public:
  KernelCall(const c10::FunctionSchema& schema, const Stack& stack)
      : schema_(schema), stack_(stack) {}

  const c10::IValue& argument(std::string_view name) const {
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size() && i < stack_.size(); ++i) {
      if (arguments[i].name() == name) return stack_[i];
    }
    throw InternalError(concat(schema_.name(), ": no argument '", name, "'"));
  }

  bool has(std::string_view name) const {
    return schema_.argumentIndexWithName(std::string(name)).has_value();
  }

  // The tensor of an argument; undefined if it is left out.
  at::Tensor tensor(std::string_view name) const {
    const c10::IValue& value = argument(name);
    return value.isTensor() ? value.toTensor() : at::Tensor();
  }

  template <typename Got, typename Want>
  void check(bool is_good, std::string_view name, const Got& got, const Want& want) const {
    if (is_good) return;
    throw UserError(concat(schema_.name(), ": argument '", name, "': got ", got, ", want ", want));
  }

  void want_same_sizes(std::string_view name, std::string_view other) const {
    const at::Tensor one = tensor(name), two = tensor(other);
    check(one.defined() && two.defined() && one.sizes() == two.sizes(), name,
          one.defined() ? one.sizes() : c10::IntArrayRef(), concat("the sizes of '", other, "'"));
    check(one.scalar_type() == two.scalar_type(), name, one.scalar_type(), two.scalar_type());
  }

  // Checks the number of elements of a tensor, if it is given.
  void want_elements(std::string_view name, int64_t count) const {
    const at::Tensor given = tensor(name);
    check(!given.defined() || given.numel() == count, name,
          concat(given.defined() ? given.numel() : 0, " elements"), count);
  }

  // Checks that the indices are below `end`; -1 means none.
  void want_places(std::string_view name, int64_t end) const {
    const at::Tensor given = tensor(name);
    if (given.numel() == 0) return;
    const auto [least, most] = at::aminmax(given);
    check(least.item<int64_t>() >= -1 && most.item<int64_t>() < end, name,
          concat(least.item<int64_t>(), " to ", most.item<int64_t>()),
          concat("places below ", end));
  }

 private:
  const c10::FunctionSchema& schema_;
  const Stack& stack_;
};

void check_softmax_backward(const KernelCall& call) {
  call.want_same_sizes("grad_output", "output");
}

// Checks the statistics of rows, by name, and what is of the size of a row.
void check_norm_backward(const KernelCall& call, std::initializer_list<const char*> of_rows,
                         std::initializer_list<const char*> of_columns) {
  call.want_same_sizes("grad_out", "input");
  const at::Tensor input = call.tensor("input");
  const std::vector<int64_t> normalized = call.argument("normalized_shape").toIntVector();
  const size_t rank = input.dim(), inner = normalized.size();
  const bool fits = inner >= 1 && inner <= rank &&
                    input.sizes().slice(rank - inner) == c10::IntArrayRef(normalized);
  call.check(fits, "normalized_shape", c10::IntArrayRef(normalized), "the last sizes of 'input'");
  const int64_t columns = c10::multiply_integers(normalized);
  const int64_t rows = c10::multiply_integers(input.sizes().slice(0, rank - inner));
  for (const char* name : of_rows) {
    call.check(call.tensor(name).defined(), name, "none", "a tensor");
    call.want_elements(name, rows);
  }
  for (const char* name : of_columns) call.want_elements(name, columns);
}

void check_layer_norm_backward(const KernelCall& call) {
  check_norm_backward(call, {"mean", "rstd"}, {"weight", "bias"});
}

void check_rms_norm_backward(const KernelCall& call) {
  check_norm_backward(call, {"rstd"}, {"weight"});
}

void check_group_norm(const KernelCall& call) {
  call.check(call.argument("group").toInt() > 0, "group", call.argument("group").toInt(),
             "1 or more");
}

void check_batch_norm(const KernelCall& call) {
  const at::Tensor input = call.tensor("input");
  call.check(input.dim() >= 2, "input", input.sizes(), "two dims or more");
  for (const char* name : {"weight", "bias", "running_mean", "running_var"}) {
    if (call.has(name)) call.want_elements(name, input.size(1));
  }
  const bool is_training = !call.has("training") || call.argument("training").toBool();
  for (const char* name : {"running_mean", "running_var"}) {
    const bool is_there = call.has(name) && call.tensor(name).defined();
    call.check(is_training || is_there, "training", "false without statistics", "true");
  }
}

void check_batch_norm_backward(const KernelCall& call) {
  call.want_same_sizes("grad_out", "input");
  const at::Tensor input = call.tensor("input");
  call.check(input.dim() >= 2 && input.numel() > 0, "input", input.sizes(),
             "two dims or more, with elements");
  for (const char* name : {"weight", "running_mean", "running_var", "save_mean", "save_invstd"}) {
    call.want_elements(name, input.size(1));
  }
  const bool is_training = call.argument("train").toBool();
  for (const char* name :
       {is_training ? "save_mean" : "running_mean", is_training ? "save_invstd" : "running_var"}) {
    call.check(call.tensor(name).defined(), name, "none", "a tensor");
  }
}

void check_max_pool_backward(const KernelCall& call) {
  const at::Tensor input = call.tensor("self"), grad = call.tensor("grad_output");
  const at::Tensor indices = call.tensor("indices");
  call.check(indices.sizes() == grad.sizes(), "indices", indices.sizes(), grad.sizes());
  const int64_t num_spatial = call.argument("kernel_size").toIntVector().size();
  const int64_t spatial = num_spatial == 3 ? 3 : 2;
  call.check(input.dim() >= spatial, "self", input.sizes(), concat(spatial, " dims or more"));
  call.want_places("indices", c10::multiply_integers(input.sizes().slice(input.dim() - spatial)));
}

void check_attention_backward(const KernelCall& call) {
  const at::Tensor query = call.tensor("query"), key = call.tensor("key");
  for (const char* name : {"grad_out", "out"}) call.want_same_sizes(name, "query");
  call.want_same_sizes("value", "key");
  call.check(query.dim() == 4 && key.dim() == 4, "query", query.sizes(), "4 dims");
  call.check(
      query.size(0) == key.size(0) && query.size(1) == key.size(1) && query.size(3) == key.size(3),
      "key", key.sizes(), "batches, heads and features of 'query'");
  call.check(query.numel() > 0 && key.numel() > 0, "query", query.sizes(), "elements");
  call.want_elements("logsumexp", query.size(0) * query.size(1) * query.size(2));
}

void check_pairwise_distance(const KernelCall& call) {
  const at::Tensor points = call.tensor("self");
  call.check(points.dim() == 2, "self", points.sizes(), "2 dims");
}

void check_pairwise_distance_backward(const KernelCall& call) {
  check_pairwise_distance(call);
  const int64_t num_points = call.tensor("self").size(0);
  for (const char* name : {"grad", "pdist"}) {
    call.want_elements(name, num_points * (num_points - 1) / 2);
  }
}

static void check_weight_norm(const KernelCall& call, const char* weight, const char* norms) {
  const at::Tensor v = call.tensor(weight);
  const int64_t dim = call.argument("dim").toInt();
  call.check(dim == 0 || dim == v.dim() - 1, "dim", dim, concat("0 or ", v.dim() - 1));
  call.check(v.dim() > 0, weight, v.sizes(), "a dim or more");
  call.want_elements(norms, v.size(dim));
}

void check_weight_norm(const KernelCall& call) { check_weight_norm(call, "v", "g"); }

void check_weight_norm_backward(const KernelCall& call) {
  check_weight_norm(call, "saved_v", "saved_g");
  call.want_same_sizes("grad_w", "saved_v");
  call.want_elements("saved_norms", call.tensor("saved_g").numel());
}

void check_distance_backward(const KernelCall& call) {
  const at::Tensor x1 = call.tensor("x1"), x2 = call.tensor("x2");
  const int64_t rank = x1.dim();
  const bool fits = rank >= 2 && x2.dim() == rank && x1.size(-1) == x2.size(-1) &&
                    x1.sizes().slice(0, rank - 2) == x2.sizes().slice(0, rank - 2);
  call.check(fits, "x2", x2.sizes(), "batches and columns of 'x1'");
  std::vector<int64_t> sizes = x1.sizes().vec();
  sizes.back() = x2.size(-2);
  for (const char* name : {"grad", "cdist"}) {
    call.check(call.tensor(name).sizes() == c10::IntArrayRef(sizes), name,
               call.tensor(name).sizes(), c10::IntArrayRef(sizes));
  }
}

void check_transform(const KernelCall& call) {
  const int64_t rank = call.tensor("self").dim();
  const std::vector<int64_t> dims = call.argument("dim").toIntVector();
  std::vector<bool> is_named(rank, false);
  for (int64_t dim : dims) {
    const bool is_good = dim >= -rank && dim < rank && !is_named[dim < 0 ? dim + rank : dim];
    call.check(is_good, "dim", c10::IntArrayRef(dims), concat("each once, of ", rank));
    is_named[dim < 0 ? dim + rank : dim] = true;
  }
  call.check(!dims.empty(), "dim", "none", "one or more");
  const int64_t normalization = call.argument("normalization").toInt();
  call.check(normalization >= 0 && normalization <= 2, "normalization", normalization, "0 to 2");
}

void check_kernel_arguments(const c10::OperatorHandle& op, const Stack& stack) {
  const KernelCheck check = registry().operator_row(op.schema().name()).check;
  if (check != nullptr) check(KernelCall(op.schema(), stack));
}

}  // namespace torch_ort::ops
