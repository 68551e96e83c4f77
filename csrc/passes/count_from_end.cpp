// Gather(x, i) and similar ops of a file: i -> Where(i < 0, i + size, i)
// In ONNX a negative index counts from the end of its axis; PyTorch's kernels, which run these ops,
// reject it. Captured graphs have these ops only where PyTorch rejects such indices as well.
// Declines if all indices are constants and none is negative.

#include "base/error.h"
#include "ir/edit.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

constexpr int kIndex = 1;  // the slot of the indices

bool reads_indices(const Node& node) {
  const ops::Op* op = ops::registry().find(node.op);
  return op != nullptr && op->indexes;
}

bool may_be_negative(const Value& index) {
  const auto data = ops::constant_data(index);
  if (data == nullptr || data->bytes == nullptr) return true;
  const int64_t count = static_cast<int64_t>(data->num_bytes) / ir::size_bytes(data->dtype);
  for (int64_t i = 0; i < count; ++i) {
    const ops::Arg element = ops::element(*data, i);
    const auto* dim = std::get_if<Dim>(&element.value);
    if (dim == nullptr || dim->constant() < 0) return true;
  }
  return false;
}

class Counter {
 public:
  Counter(Graph& graph, Node& reader)
      : graph_(graph), reader_(reader), index_(*reader.inputs[kIndex]), write_(graph, &reader) {}

  void run(const Dim& size) {
    const Type& type = index_.type;
    Value& zero = number(0);
    Value& length = size.is_constant() ? number(size.constant()) : computed(size);
    Type flags = ops::with_shape(type, type.shape);
    flags.dtype = DType::kBool;
    Value& is_negative = add("Less", {&index_, &zero}, flags);
    Value& counted = add("Add", {&index_, &length}, ops::with_shape(type, type.shape));
    ir::set_input(
        reader_, kIndex,
        &add("Where", {&is_negative, &counted, &index_}, ops::with_shape(type, type.shape)));
  }

 private:
  Value& add(const char* op, std::vector<Value*> inputs, const Type& type) {
    return *write_.add({"", op}, std::move(inputs), {type}).outputs[0];
  }

  Type scalar_type(DType dtype) const {
    Type type = ops::with_shape(index_.type, Shape());
    type.dtype = dtype;
    return type;
  }

  Value& number(int64_t value) {
    const DType dtype = index_.type.dtype;
    return ir::add_initializer(graph_, "constant", scalar_type(dtype),
                               ops::scalar_data(ops::Arg(value), dtype));
  }

  Value& computed(const Dim& size) {
    Value* sizes = write_.ints({size});
    Value* first = write_.scalar(0, DType::kInt64);
    return *write_.cast(write_.make("Gather", {sizes, first}), index_.type.dtype);
  }

  Graph& graph_;
  Node& reader_;
  Value& index_;
  ops::Writer write_;
};

}  // namespace

int count_from_end(Graph& graph, PassContext& /*context*/) {
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (node.is_erased() || !reads_indices(node)) continue;
    const Value &data = ops::input(node, 0), &index = ops::input(node, kIndex);
    const bool is_integer = index.type.dtype == DType::kInt64 || index.type.dtype == DType::kInt32;
    if (!is_integer || !data.type.shape || !may_be_negative(index)) continue;
    const auto rank = static_cast<int64_t>(data.type.shape->size());
    const int64_t axis = ops::wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank);
    const Dim size = (*data.type.shape)[axis];
    // The dtype of the indices cannot represent the size, so it cannot be added to them.
    if (size.is_constant() && ops::scalar_data(ops::Arg(size), index.type.dtype) == nullptr)
      continue;
    Counter(graph, node).run(size);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
