// Ops that read or write elements by index.
// Negative indices raise, as they do in PyTorch; passes/count_from_end.cpp is for files.

#include "base/error.h"
#include "ops/families.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using enum AttrKind;

int64_t axis_of(const Node& node) {
  const Shape& shape = known_shape(node, input(node, 0));
  return wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), static_cast<int64_t>(shape.size()));
}

// ---- Gather

// One index that is known at compile time: the result is a view.
std::optional<Arg> known_position(const Node& node) {
  const Value& index = input(node, 1);
  if (!index.type.shape || !index.type.shape->empty()) return std::nullopt;
  return known_number(&index);
}

// PyTorch's kernels interpret indices of other dtypes differently, or raise errors without a name.
void check_index(const Node& node) {
  const ir::DType dtype = input(node, 1).type.dtype;
  if (dtype == ir::DType::kInt64 || dtype == ir::DType::kInt32 || dtype == ir::DType::kUndefined) {
    return;
  }
  throw UserError(concat(node.op.str(), ": dtype of the indices: got ", ir::name(dtype),
                         ", want int64 or int32"));
}

std::vector<Type> infer_gather(const Node& node) {
  check_index(node);
  const Value &data = input(node, 0), &index = input(node, 1);
  if (!data.type.shape || !index.type.shape) return {with_shape(data.type, std::nullopt)};
  const int64_t axis = axis_of(node);
  Shape shape = *data.type.shape;
  shape.erase(shape.begin() + axis);
  if (known_position(node)) {
    Shape strides = strides_of(data.type);
    strides.erase(strides.begin() + axis);
    return {view_type(data.type, std::move(shape), strides)};
  }
  shape.insert(shape.begin() + axis, index.type.shape->begin(), index.type.shape->end());
  return {with_shape(data.type, std::move(shape))};
}

void lower_gather(const Node& node, CallList& calls) {
  check_index(node);
  Value *data = node.inputs[0], *index = &input(node, 1), *result = node.outputs[0];
  const int64_t axis = axis_of(node);
  const size_t rank = data->type.shape->size();
  if (std::optional<Arg> position = known_position(node)) {
    calls.add("aten::select", "int", {data, axis, *position}, {result});
    return;
  }
  if (axis == 0 && rank == 2) {
    calls.add("aten::embedding", "", {data, index, -1, false, false}, {result});
    return;
  }
  const Shape& indices = known_shape(node, *index);
  if (indices.size() == 1) {
    calls.add("aten::index_select", "", {data, axis, index}, {result});
    return;
  }
  const ir::Dim count = ir::numel(indices);
  Value* flat = calls.temporary(with_shape(index->type, Shape{count}));
  calls.add("aten::reshape", "", {index, Arg::list(Shape{count})}, {flat});
  Shape shape = *data->type.shape;
  shape[axis] = count;
  Value* rows = calls.temporary(with_shape(data->type, shape));
  calls.add("aten::index_select", "", {data, axis, flat}, {rows});
  calls.add("aten::reshape", "", {rows, Arg::list(*infer_gather(node)[0].shape)}, {result});
}

bool is_gather_view(const Node& node) { return known_position(node).has_value(); }

// A Gather of rows, which a region reads in place. A single known row is a view instead.
FusedForm fused_gather(const Node& node) {
  const Type &table = node.inputs[0]->type, &ids = input(node, 1).type;
  const bool names_rows = ids.dtype == ir::DType::kInt64 || ids.dtype == ir::DType::kInt32;
  if (!ir::is_float(table.dtype) || !names_rows || ids.shape->empty()) return {};
  const auto rank = static_cast<int64_t>(table.shape->size());
  if (rank < 2 || wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank) != 0) return {};
  return {FusedForm::Kind::kGather};
}

// ---- GatherElements, ScatterElements

std::vector<Type> infer_gather_elements(const Node& node) {
  return {with_shape(input(node, 0).type, input(node, 1).type.shape)};
}

// The kernels for these ops accept 64-bit indices only.
Value* long_index(Value& index, CallList& calls) {
  if (index.type.dtype != ir::DType::kInt32) return &index;
  Type type = with_shape(index.type, index.type.shape);
  type.dtype = ir::DType::kInt64;
  Value* result = calls.temporary(type);
  calls.add("aten::_to_copy", "", {&index, "int64", Arg(), Arg(), Arg(), false, Arg()}, {result});
  return result;
}

void lower_gather_elements(const Node& node, CallList& calls) {
  check_index(node);
  Value* index = long_index(input(node, 1), calls);
  calls.add("aten::gather", "", {node.inputs[0], axis_of(node), index, false}, {node.outputs[0]});
}

std::string reduction(const Node& node) { return ir::string_attr(node.attrs, "reduction", "none"); }

void lower_scatter_elements(const Node& node, CallList& calls) {
  check_index(node);
  Value *data = node.inputs[0], *updates = &input(node, 2);
  Value* index = long_index(input(node, 1), calls);
  const int64_t axis = axis_of(node);
  const std::string kind = reduction(node);
  if (kind == "none") {
    calls.add("aten::scatter", "src", {data, axis, index, updates}, {node.outputs[0]});
  } else if (kind == "add") {
    calls.add("aten::scatter_add", "", {data, axis, index, updates}, {node.outputs[0]});
  } else if (kind == "mul" || kind == "max" || kind == "min") {
    const char* name = kind == "mul" ? "prod" : kind == "max" ? "amax" : "amin";
    calls.add("aten::scatter_reduce", "two", {data, axis, index, updates, name, true},
              {node.outputs[0]});
  } else {
    throw UserError(
        concat("ScatterElements: reduction: got '", kind, "', want none, add, mul, max or min"));
  }
}

int scatter_elements_since(const Node& node) {
  const std::string kind = reduction(node);
  if (kind == "none") return 11;
  return kind == "add" || kind == "mul" ? 16 : 18;
}

// What the functional kernel does: select rows of the flat ids, and reshape the result.
bool take_embedding_as_select(const Call& call, bool, CallList& calls) {
  auto* table = std::get<Value*>(call.args.at(0).value);
  auto* ids = std::get<Value*>(call.args.at(1).value);
  Value* result = call.outputs.at(0);
  if (result == nullptr || !ids->type.is_known() || !table->type.is_known()) return false;
  if (table->type.shape->size() != 2) return false;
  if (ids->type.shape->size() == 1) {
    calls.add("aten::index_select", "", {table, 0, ids}, call.outputs);
    return true;
  }
  const ir::Dim count = ir::numel(*ids->type.shape);
  Value* flat = calls.temporary(with_shape(ids->type, Shape{count}));
  Value* rows = calls.temporary(with_shape(result->type, Shape{count, table->type.shape->at(1)}));
  calls.add("aten::reshape", "", {ids, Arg::list(Shape{-1})}, {flat});
  calls.add("aten::index_select", "", {table, 0, flat}, {rows});
  calls.add("aten::view", "", {rows, Arg::list(*result->type.shape)}, {result});
  return true;
}

}  // namespace

void register_embedding(Registry& ops) {
  Op gather;
  gather.name = "Gather";
  gather.min_inputs = gather.max_inputs = 2;
  gather.attributes = {{"axis", kInt}};
  gather.since = 11;
  gather.infer = infer_gather;
  gather.lower = lower_gather;
  gather.view_of = is_gather_view;
  gather.indexes = true;
  gather.work.fused = fused_gather;
  ops.add(gather);

  Op gather_elements;
  gather_elements.name = "GatherElements";
  gather_elements.min_inputs = gather_elements.max_inputs = 2;
  gather_elements.attributes = {{"axis", kInt}};
  gather_elements.since = 11;
  gather_elements.infer = infer_gather_elements;
  gather_elements.lower = lower_gather_elements;
  gather_elements.indexes = true;
  ops.add(gather_elements);

  Op scatter_elements;
  scatter_elements.name = "ScatterElements";
  scatter_elements.min_inputs = scatter_elements.max_inputs = 3;
  scatter_elements.attributes = {{"axis", kInt}, {"reduction", kString}};
  scatter_elements.since = 11;
  scatter_elements.infer = infer_like_first;
  scatter_elements.lower = lower_scatter_elements;
  scatter_elements.since_of = scatter_elements_since;
  scatter_elements.indexes = true;
  ops.add(scatter_elements);

  ops.add(Operator{.name = "aten::embedding", .out_rewrite = take_embedding_as_select});
}

}  // namespace torch_ort::ops
