// Sums, means, extremes and norms along axes.

#include "convert/families.h"
#include "convert/rows.h"
#include "ops/dtypes.h"

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::DType;
using ir::Shape;
using ir::Value;
using Values = std::vector<Value*>;

using Accepts = bool (*)(DType);

const ops::Arg* find_arg(const AtenCall& call, std::string_view name) {
  for (size_t i = 0; i < call.args.size(); ++i) {
    if (call.arg_names[i] == name) return &call.args[i];
  }
  return nullptr;
}

// The tensor to reduce, cast to a wider dtype if the call asks for one, as autocast does for sums.
// Nothing if the call computes in another dtype, because PyTorch's kernels then round differently.
Value* reduced(Builder& builder, const AtenCall& call, Accepts accepts) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !x->type.shape || !accepts(x->type.dtype)) return nullptr;
  const DType given = x->type.dtype, wanted = call.types[0].dtype;
  const ops::Arg* dtype = find_arg(call, "dtype");
  if (dtype != nullptr && text(*dtype, ir::name(given)) != ir::name(wanted)) return nullptr;
  if (given == wanted) return x;
  const bool widens = dtype != nullptr && is_float(given) && is_float(wanted) &&
                      ir::size_bytes(given) < ir::size_bytes(wanted);
  return widens ? builder.cast(x, wanted) : nullptr;
}

// The axes as positive numbers; all of them if the call names none.
Shape axes_of(const ops::Arg& given, size_t rank) {
  Shape axes = dims(given);
  for (Dim& axis : axes) {
    if (axis.constant() < 0) axis = axis.constant() + static_cast<int64_t>(rank);
  }
  if (!axes.empty()) return axes;
  for (size_t axis = 0; axis < rank; ++axis) axes.push_back(static_cast<int64_t>(axis));
  return axes;
}

Dim keepdims(const AtenCall& call) { return Dim(boolean(call.arg("keepdim")) ? 1 : 0); }

Values along(Builder& builder, const AtenCall& call, const std::string& op, Value* x) {
  // PyTorch accepts axes 0 and -1 for a 0-d tensor, and ONNX does not.
  if (x->type.shape->empty()) return standard(builder, op, {x}, call.types, {{"keepdims", Dim(0)}});
  const Shape axes = axes_of(call.arg("dim"), x->type.shape->size());
  return reduce(builder, op, x, axes, boolean(call.arg("keepdim")), call.types);
}

Values of_pair(Builder& builder, const AtenCall& call, const ops::Op& op, const ops::Pair& pair) {
  Value* x = reduced(builder, call, pair.accepts);
  if (x == nullptr) return {};
  if (pair.form == ops::Pair::Form::kAlong) return along(builder, call, op.name, x);
  return standard(builder, op.name, {x}, call.types, {{"keepdims", Dim(0)}});
}

Values vector_norm(Builder& builder, const AtenCall& call) {
  Value* x = reduced(builder, call, is_float);
  const ops::Arg& order = call.arg("ord");
  if (x == nullptr || !is_number(order)) return {};
  if (number(order) != 1.0 && number(order) != 2.0) return {};
  const std::string op = number(order) == 1.0 ? "ReduceL1" : "ReduceL2";
  if (!call.arg("dim").is_none()) return along(builder, call, op, x);
  return standard(builder, op, {x}, call.types, {{"keepdims", keepdims(call)}});
}

Values cumsum(Builder& builder, const AtenCall& call) {
  Value* x = reduced(builder, call, ops::is_summable);
  if (x == nullptr || x->type.shape->empty()) return {};
  const int64_t at = axis(call, "dim", x->type.shape->size());
  return standard(builder, "CumSum", {x, builder.scalar(static_cast<double>(at), DType::kInt64)},
                  call.types);
}

}  // namespace

void add_reduction(Table& table) {
  add_pairs(table, ops::Pair::Form::kAlong, of_pair);
  add_pairs(table, ops::Pair::Form::kTotal, of_pair);
  table.add("aten::cumsum", cumsum);
  table.add("aten::linalg_vector_norm", vector_norm);
}

}  // namespace torch_ort::convert
