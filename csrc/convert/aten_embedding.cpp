// Reads and writes by index. `index.Tensor` stays an ATen node: it takes negative indices.

#include "convert/families.h"
#include "convert/rows.h"

#include <algorithm>

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::Shape;
using ir::Value;
using Values = std::vector<Value*>;

bool is_index(const Value* value) {
  return value != nullptr && value->type.shape &&
         (value->type.dtype == ir::DType::kInt64 || value->type.dtype == ir::DType::kInt32);
}

Values embedding(Builder& builder, const AtenCall& call) {
  Value *weight = tensor(call.arg("weight")), *index = tensor(call.arg("indices"));
  if (weight == nullptr || !weight->type.shape || !is_index(index)) return {};
  if (weight->type.shape->size() != 2 || !can_use(builder, "Gather", weight->type.dtype)) return {};
  return builder.node("Gather", {weight, index}, call.types, {{"axis", Dim(0)}});
}

Values index_select(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *index = tensor(call.arg("index"));
  if (x == nullptr || !x->type.shape || x->type.shape->empty() || !is_index(index)) return {};
  // With an index without dims, PyTorch keeps the dim and ONNX drops it.
  if (index->type.shape->size() != 1 || !can_use(builder, "Gather", x->type.dtype)) return {};
  const int64_t at = axis(call, "dim", x->type.shape->size());
  return builder.node("Gather", {x, index}, call.types, {{"axis", Dim(at)}});
}

// The tensor and the index of a call that indexes each element; also the axis if they fit together.
struct ElementCall {
  Value* x = nullptr;
  Value* index = nullptr;
  int64_t at = -1;
};

ElementCall element_call(const AtenCall& call) {
  ElementCall result = {tensor(call.arg("self")), tensor(call.arg("index"))};
  if (result.x == nullptr || !result.x->type.shape || !is_index(result.index)) return result;
  const Shape &shape = *result.x->type.shape, &indices = *result.index->type.shape;
  if (shape.empty() || shape.size() != indices.size()) return result;
  result.at = axis(call, "dim", shape.size());
  return result;
}

Values gather(Builder& builder, const AtenCall& call) {
  const auto [x, index, at] = element_call(call);
  if (at < 0 || !can_use(builder, "GatherElements", x->type.dtype)) return {};
  // In PyTorch the index may be shorter than the tensor in other dims.
  for (size_t i = 0; i < x->type.shape->size(); ++i) {
    const bool is_equal = (*x->type.shape)[i] == (*index->type.shape)[i];
    if (static_cast<int64_t>(i) != at && !is_equal) return {};
  }
  return builder.node("GatherElements", {x, index}, call.types, {{"axis", Dim(at)}});
}

Values scatter(Builder& builder, const AtenCall& call, const char* reduction, int since) {
  const auto [x, index, at] = element_call(call);
  Value* updates = tensor(call.arg("src"));
  if (at < 0 || updates == nullptr || updates->type.dtype != x->type.dtype) return {};
  if (updates->type.shape != index->type.shape) return {};
  if (!can_use(builder, "ScatterElements", x->type.dtype) || !builder.allows(since)) return {};
  ir::Attrs attrs = {{"axis", Dim(at)}};
  if (reduction != nullptr) attrs["reduction"] = std::string(reduction);
  return builder.node("ScatterElements", {x, index, updates}, call.types, std::move(attrs));
}

Values scatter_src(Builder& builder, const AtenCall& call) {
  return scatter(builder, call, nullptr, 11);
}
Values scatter_add(Builder& builder, const AtenCall& call) {
  return scatter(builder, call, "add", 16);
}

Values scatter_reduce(Builder& builder, const AtenCall& call) {
  if (!boolean(call.arg("include_self"))) return {};
  const std::string kind = text(call.arg("reduce"));
  if (kind == "amax") return scatter(builder, call, "max", 18);
  if (kind == "amin") return scatter(builder, call, "min", 18);
  if (kind == "prod") return scatter(builder, call, "mul", 16);
  return {};
}

}  // namespace

void add_embedding(Table& table) {
  table.add("aten::embedding", embedding);
  table.add("aten::index_select", index_select);
  table.add("aten::gather", gather);
  table.add("aten::scatter.src", scatter_src);
  table.add("aten::scatter_add", scatter_add);
  table.add("aten::scatter_reduce.two", scatter_reduce);
}

}  // namespace torch_ort::convert
