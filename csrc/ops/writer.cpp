#include "ops/writer.h"

#include "base/error.h"
#include "ir/edit.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>

namespace torch_ort::ops {

namespace {

using ir::Attrs;
using ir::Dim;
using ir::DType;
using ir::Node;
using ir::OpId;
using ir::Shape;
using ir::Type;
using ir::Value;

// ReduceMean -> reduce_mean
std::string in_snake_case(std::string_view op) {
  const auto is_upper = [](char letter) { return letter >= 'A' && letter <= 'Z'; };
  std::string name;
  for (size_t i = 0; i < op.size(); ++i) {
    if (i > 0 && is_upper(op[i]) && !is_upper(op[i - 1])) name += '_';
    name += is_upper(op[i]) ? static_cast<char>(op[i] - 'A' + 'a') : op[i];
  }
  return name;
}

}  // namespace

Writer::Writer(ir::Graph& graph, Node* before, std::string composite)
    : graph_(graph), before_(before), composite_(std::move(composite)) {}

Node& Writer::add(OpId op, std::vector<Value*> inputs, const std::vector<Type>& types,
                  Attrs attrs) {
  std::string name = in_snake_case(op.name);
  if (!composite_.empty()) name = concat(composite_, "_", name);
  return add_named(name, std::move(op), std::move(inputs), types, std::move(attrs));
}

Node& Writer::add_named(std::string_view name, OpId op, std::vector<Value*> inputs,
                        const std::vector<Type>& types, Attrs attrs) {
  Node& node =
      before_ == nullptr
          ? ir::append(graph_, std::move(op), std::move(inputs), types, std::move(attrs), name)
          : ir::insert_before(graph_, *before_, std::move(op), std::move(inputs), types,
                              std::move(attrs), name);
  const auto is_open = [](const Type& type) { return type.dtype == DType::kUndefined; };
  if (std::all_of(types.begin(), types.end(), is_open)) infer_types(node);
  return node;
}

Value* Writer::make(std::string_view op, std::vector<Value*> inputs, Attrs attrs) {
  return add({"", std::string(op)}, std::move(inputs), {Type()}, std::move(attrs)).outputs[0];
}

Value* Writer::make_ours(std::string_view op, std::vector<Value*> inputs, const Type& type,
                         Attrs attrs) {
  return add({ir::kTorchOrtDomain, std::string(op)}, std::move(inputs), {type}, std::move(attrs))
      .outputs[0];
}

Node& Writer::copy(const Node& node, std::vector<Value*> inputs, const std::vector<Type>& types) {
  Node& made = add_named(node.name, node.op, std::move(inputs), types, node.attrs);
  made.origin = node.origin;
  made.recompute = node.recompute;
  made.checkpoint = node.checkpoint;
  made.segment = node.segment;
  made.captured = node.captured;
  return made;
}

Node& Writer::again(const Node& node, std::vector<Value*> inputs) {
  std::vector<Type> types;
  for (const Value* output : node.outputs) types.push_back(output ? output->type : Type());
  Node& made =
      add_named(concat(node.name, "_again"), node.op, std::move(inputs), types, node.attrs);
  made.origin = node.origin;
  made.recompute.clear();
  made.checkpoint = made.segment = -1;
  made.captured = node.captured;
  return made;
}

Value* Writer::ints(const Shape& dims) {
  const Type type{.dtype = DType::kInt64, .shape = Shape{static_cast<int64_t>(dims.size())}};
  if (!ir::is_constant(dims)) return make_ours("Dims", {}, type, {{"dims", dims}});
  std::vector<int64_t> numbers;
  for (const Dim& dim : dims) numbers.push_back(dim.constant());
  return &ir::add_initializer(graph_, "ints", type, ir::make_int64_data(numbers));
}

Value* Writer::scalar(double number, DType dtype) {
  const auto data = scalar_data(number, dtype);
  if (data == nullptr) return nullptr;
  return &ir::add_initializer(graph_, "constant", Type{.dtype = dtype, .shape = Shape{}}, data);
}

Value* Writer::cast(Value* x, DType dtype) {
  if (x->type.dtype == dtype) return x;
  return make("Cast", {x}, {{"to", Dim(static_cast<int64_t>(dtype))}});
}

Value* Writer::reshape(Value* x, const Shape& shape) { return make("Reshape", {x, ints(shape)}); }

Value* Writer::transpose(Value* x, const Shape& order) {
  return make("Transpose", {x}, {{"perm", order}});
}

Value* Writer::reduce(std::string_view op, Value* x, const Shape& axes, bool keeps_dims) {
  return make(op, {x, ints(axes)}, {{"keepdims", Dim(keeps_dims ? 1 : 0)}});
}

}  // namespace torch_ort::ops
