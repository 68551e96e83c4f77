#include "ops/broadcast.h"

#include "base/error.h"
#include "ops/shapes.h"

#include <algorithm>

namespace torch_ort::ops {

using ir::Dim;
using ir::Shape;

namespace {

std::optional<Dim> broadcast_dim(const ir::Node& node, const Dim& a, const Dim& b) {
  if (a == b || b == Dim(1)) return a;
  if (a == Dim(1)) return b;
  if (!a.is_constant() && !b.is_constant()) return std::nullopt;
  return same_dim(node, a, b);
}

}  // namespace

std::optional<Shape> broadcast(const ir::Node& node, const std::optional<Shape>& a,
                               const std::optional<Shape>& b) {
  if (!a || !b) return std::nullopt;
  const Shape& longer = a->size() >= b->size() ? *a : *b;
  const Shape& shorter = a->size() >= b->size() ? *b : *a;
  const size_t offset = longer.size() - shorter.size();
  Shape shape = longer;
  for (size_t i = 0; i < shorter.size(); ++i) {
    std::optional<Dim> dim = broadcast_dim(node, longer[offset + i], shorter[i]);
    if (!dim) return std::nullopt;
    shape[offset + i] = *dim;
  }
  return shape;
}

std::optional<Shape> broadcast_inputs(const ir::Node& node) {
  std::optional<Shape> shape = input(node, 0).type.shape;
  for (size_t slot = 1; slot < node.inputs.size(); ++slot) {
    if (has_input(node, slot)) shape = broadcast(node, shape, node.inputs[slot]->type.shape);
  }
  return shape;
}

std::optional<Shape> broadcast_with_symbols(const ir::Node& node) {
  size_t rank = 0;
  for (const ir::Value* value : node.inputs) {
    if (value == nullptr || !value->type.shape) return std::nullopt;
    rank = std::max(rank, value->type.shape->size());
  }
  Shape shape(rank, Dim(1));
  for (const ir::Value* value : node.inputs) {
    const Shape& given = *value->type.shape;
    for (size_t i = 0; i < given.size(); ++i) {
      const size_t axis = rank - given.size() + i;
      shape[axis] = broadcast_dim(node, shape[axis], given[i])
                        // No file can name a symbol so.
                        .value_or(Dim::symbol(concat(node.outputs.at(0)->name, "#", axis)));
    }
  }
  return shape;
}

void want_same_dtype(const ir::Node& node, const std::vector<size_t>& slots) {
  ir::DType wanted = ir::DType::kUndefined;
  for (size_t slot : slots) {
    const ir::DType dtype = input(node, slot).type.dtype;
    if (wanted == ir::DType::kUndefined) wanted = dtype;
    if (dtype == wanted || dtype == ir::DType::kUndefined) continue;
    throw UserError(concat(node.op.str(), ": dtype of input ", slot, ": got ", ir::name(dtype),
                           ", want ", ir::name(wanted)));
  }
}

ir::Type type_like_inputs(const ir::Node& node, ir::DType dtype, std::optional<Shape> shape) {
  ir::Type type = with_shape(input(node, 0).type, std::move(shape));
  type.dtype = dtype;
  for (const ir::Value* value : node.inputs) {
    if (value != nullptr && value->type.device.kind != "cpu") type.device = value->type.device;
  }
  return type;
}

}  // namespace torch_ort::ops
