#include "passes/composites/expander.h"

#include "ir/edit.h"
#include "ops/shapes.h"
#include "passes/unread.h"

namespace torch_ort::passes::composites {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Value;

namespace {

// Whether the second Transpose undoes the first one.
bool undoes(const Node& second, const Node& first) {
  if (!ir::is(&second, "Transpose") || !ir::is(&first, "Transpose")) return false;
  const Shape back = ir::ints_attr(second.attrs, "perm", {});
  const Shape order = ir::ints_attr(first.attrs, "perm", {});
  if (back.size() != order.size()) return false;
  for (size_t i = 0; i < back.size(); ++i) {
    if (!(order.at(back[i].constant()) == Dim(static_cast<int64_t>(i)))) return false;
  }
  return true;
}

}  // namespace

Expander::Expander(ir::Graph& graph, Node& node, const Value& like)
    : Writer(graph, &node, node.name),
      node_(node),
      dtype_(ops::computed_dtype(like.type.dtype)),
      formula_(*this, dtype_, ops::Reader::kRegion) {}

Value* Expander::ones(const Shape& shape) {
  const int64_t count = ir::numel(shape).constant();
  std::vector<std::byte> bytes;
  const auto one = ops::scalar_data(1.0, dtype_);
  for (int64_t i = 0; i < count; ++i) {
    bytes.insert(bytes.end(), one->bytes, one->bytes + one->num_bytes);
  }
  std::vector<int64_t> sizes;
  for (const Dim& dim : shape) sizes.push_back(dim.constant());
  return &ir::add_initializer(graph(), "ones", {.dtype = dtype_, .shape = shape},
                              ir::make_tensor_data(dtype_, sizes, std::move(bytes)));
}

Value* Expander::ratio(double factor, const Dim& numerator, const Dim& denominator) {
  if (numerator.is_constant() && denominator.is_constant()) {
    return constant(factor * static_cast<double>(numerator.constant()) /
                    static_cast<double>(denominator.constant()));
  }
  return make_ours("SizeRatio", {}, {.dtype = dtype_, .shape = Shape{}},
                   {{"denominator", denominator}, {"factor", factor}, {"numerator", numerator}});
}

Value* Expander::mul_add(Value* x, Value* factor, Value* offset) {
  return make_ours("MulAdd", {x, factor, offset}, typed(*x->type.shape, *x));
}

Value* Expander::sum_all(Value* value) {
  return make("ReduceSum", {value}, {{"keepdims", Dim(0)}});
}

Value* Expander::log1p(Value* x) { return make_ours("Log1p", {x}, typed(*x->type.shape, *x)); }

Value* Expander::decay(Value* x) { return make("Exp", {make("Neg", {make("Abs", {x})})}); }

Value* Expander::log_sigmoid(Value* x, Value* decay) {
  return make("Sub", {make("Min", {x, constant(0)}), log1p(decay)});
}

ir::Type Expander::typed(const Shape& shape, const Value& like) const {
  return {.dtype = dtype_, .shape = shape, .device = like.type.device};
}

void Expander::replace(size_t output, Value* value) {
  if (!is_read(node_, output)) return;
  Value& old = *node_.outputs[output];
  const bool has_dtype = old.type.dtype != ir::DType::kUndefined;
  ir::replace_uses(old, has_dtype ? *cast(value, old.type.dtype) : *value, graph());
}

void Expander::replace_elements(size_t output, Value* value) {
  if (!is_read(node_, output)) return;
  Value& old = *node_.outputs[output];
  Value* made = cast(value, old.type.dtype);
  if (made->type.shape == old.type.shape) made->type.strides = old.type.strides;
  ir::replace_uses(old, *made, graph());
}

void Expander::replace_transposed(size_t output, Value* value, const Shape& order) {
  if (!is_read(node_, output)) return;
  Value& old = *node_.outputs[output];
  Value* made = transposed(cast(value, old.type.dtype), order);
  ir::replace_uses(old, *made, graph());
  const Node& maker = *made->producer;
  const std::vector<ir::Use> uses = made->uses;
  for (const ir::Use& use : uses) {
    if (use.node == nullptr || !undoes(*use.node, maker)) continue;
    ir::replace_uses(*use.node->outputs[0], *maker.inputs[0], graph());
  }
}

Value* Expander::statistic(Value* value) {
  const Node* maker = value->producer;
  const bool is_rounded = ir::is(maker, "Cast") && maker->inputs[0]->type.dtype == dtype_;
  return is_rounded ? maker->inputs[0] : number(value);
}

Value* Expander::transposed(Value* x, const Shape& order) {
  Value* made = transpose(x, order);
  const Node* maker = x->producer;
  return maker != nullptr && undoes(*made->producer, *maker) ? maker->inputs[0] : made;
}

Shape range(int64_t begin, int64_t end) {
  Shape axes;
  for (int64_t axis = begin; axis < end; ++axis) axes.push_back(axis);
  return axes;
}

bool are_last(const std::vector<int64_t>& axes, int64_t rank) {
  const auto count = static_cast<int64_t>(axes.size());
  return count > 0 && count < rank && axes.front() == rank - count;
}

Dim num_along(const Value& x, const std::vector<int64_t>& axes) {
  Shape reduced;
  for (const int64_t axis : axes) reduced.push_back(x.type.shape->at(axis));
  return ir::numel(reduced);
}

}  // namespace torch_ort::passes::composites
