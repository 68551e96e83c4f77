#include "passes/multiples.h"

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/halves.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Node;
using ir::Value;

// The form of a node that computes a multiple of one of its inputs, or a sum of two multiples.
struct Step {
  enum class Kind { kNone, kView, kNeg, kMul, kDiv, kAdd, kWhere, kPow } kind = Kind::kNone;
  Value *of = nullptr, *other = nullptr;  // the operands; Mul and Add do not distinguish them
  double number = 1;                      // the factor or exponent if `other` is nullptr
  std::optional<ir::Dim> size;            // the factor if it is a size
};

bool is_view(const Node& node) {
  for (const char* op : {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand"}) {
    if (ir::is(&node, op)) return ir::is_float(node.inputs[0]->type.dtype);
  }
  return false;
}

Step step_of_aten(const Node& node) {
  const std::string key = ops::key_of(node);
  if (key != ops::aten::kMul && key != ops::aten::kDiv) return {};
  const ops::Call call = ops::decode_aten(node);
  if (call.args.size() != 2) return {};
  Step step{.kind = key == ops::aten::kMul ? Step::Kind::kMul : Step::Kind::kDiv};
  const ops::Arg &of = call.args[0], &by = call.args[1];
  const auto* tensor = std::get_if<Value*>(&of.value);
  if (tensor == nullptr) return {};
  step.of = *tensor;
  if (const auto* other = std::get_if<Value*>(&by.value)) {
    step.other = *other;
  } else if (const auto* real = std::get_if<double>(&by.value)) {
    step.number = *real;
  } else if (const auto* size = std::get_if<ir::Dim>(&by.value)) {
    step.size = *size;
  } else {
    return {};
  }
  return step;
}

Step step_of(const Value* value) {
  using Kind = Step::Kind;
  if (value->producer == nullptr || !value->type.is_known()) return {};
  const Node& node = *value->producer;
  if (node.op.domain == ir::kAtenDomain) return step_of_aten(node);
  if (!node.op.domain.empty() || node.outputs.size() != 1) return {};
  if (is_view(node)) return {Kind::kView, node.inputs[0]};
  if (ir::is(&node, "Neg")) return {Kind::kNeg, node.inputs[0]};
  if (ir::is(&node, "Mul")) return {Kind::kMul, node.inputs[0], node.inputs[1]};
  if (ir::is(&node, "Div")) return {Kind::kDiv, node.inputs[0], node.inputs[1]};
  if (ir::is(&node, "Add")) return {Kind::kAdd, node.inputs[0], node.inputs[1]};
  if (ir::is(&node, "Pow")) {
    const std::optional<double> power = ops::known_double(node.inputs[1]);
    if (power && (*power == 1 || *power == 2)) return {Kind::kPow, node.inputs[0], nullptr, *power};
  }
  if (ir::is(&node, "Where")) {
    for (size_t side : {1, 2}) {
      if (ops::known_double(node.inputs[side]) != 0.0) continue;
      return {Kind::kWhere, node.inputs[3 - side], node.inputs[0]};
    }
  }
  return {};
}

// Of this shape, and on this device: a number of the CPU would be no operand of a GPU's kernel.
Value* ones(ops::Writer& writer, const ir::Type& like, ir::DType dtype) {
  const ir::Shape& shape = *like.shape;
  if (ir::is_host(like.device)) {
    Value* one = writer.scalar(1, dtype);
    return shape.empty() ? one : writer.make("Expand", {one, writer.ints(shape)});
  }
  ir::Type type = ops::with_shape(like, shape);
  type.dtype = dtype;
  const auto one = ops::scalar_data(ops::Arg{1.0}, dtype);
  const std::vector<std::byte> bytes(one->bytes, one->bytes + one->num_bytes);
  return writer
      .add({"", "ConstantOfShape"}, {writer.ints(shape)}, {type},
           {{"value", ir::make_tensor_data(dtype, {1}, bytes)}})
      .outputs[0];
}

}  // namespace

Multiples::Multiples(const ir::Graph& graph, const SharedMemory& memory, const Node& first)
    : memory_(memory) {
  int position = 0;
  for (const Node& node : graph.nodes) {
    positions_[&node] = position++;
    const bool depends =
        &node == &first || is_border(&node) ||
        std::any_of(node.inputs.begin(), node.inputs.end(),
                    [this](const Value* input) { return input != nullptr && is_dependent(input); });
    if (depends) dependent_.insert(&node);
  }
}

bool Multiples::is_dependent(const Value* value) const {
  return dependent_.contains(value->producer);
}

const Value* Multiples::dependent_factor(const Value* value) const {
  if (is_border(value->producer)) return nullptr;
  const Step step = step_of(value);
  if (step.kind == Step::Kind::kNone || step.kind == Step::Kind::kAdd) return nullptr;
  const bool is_first = is_dependent(step.of), is_second = step.other && is_dependent(step.other);
  if (is_first == is_second) return nullptr;
  return is_first ? step.of : step.other;
}

std::optional<Multiples::Degrees> Multiples::degrees(const Value* value, const Factors& factors,
                                                     Found& found) const {
  if (value == factors.number) return Degrees{1, 0};
  if (value == factors.rows) return Degrees{0, 1};
  if (!is_dependent(value)) {
    if (!value->type.is_known() || memory_.is_written(value)) return std::nullopt;
    return Degrees{};
  }
  const auto known = found.find(value);
  if (known != found.end()) return known->second;
  return found[value] = degrees_of_dependent(value, factors, found);
}

std::optional<Multiples::Degrees> Multiples::degrees_of_dependent(const Value* value,
                                                                  const Factors& factors,
                                                                  Found& found) const {
  using Kind = Step::Kind;
  const Step step = step_of(value);
  if (step.kind == Kind::kNone) return std::nullopt;
  const auto& inputs = value->producer->inputs;
  const bool has_dependent_shape =
      step.kind == Kind::kView &&
      std::any_of(inputs.begin() + 1, inputs.end(),
                  [this](Value* input) { return input != nullptr && is_dependent(input); });
  if (has_dependent_shape) return std::nullopt;
  const std::optional<Degrees> of = degrees(step.of, factors, found);
  if (!of) return std::nullopt;
  const std::optional<Degrees> other =
      step.other == nullptr ? Degrees{} : degrees(step.other, factors, found);
  if (!other) return std::nullopt;
  switch (step.kind) {
    case Kind::kMul: return Degrees{of->number + other->number, of->rows + other->rows};
    case Kind::kAdd: return *of == *other ? of : std::nullopt;
    case Kind::kPow: {
      const auto power = static_cast<int>(step.number);
      return Degrees{of->number * power, of->rows * power};
    }
    case Kind::kDiv:
    case Kind::kWhere: return *other == Degrees{} ? of : std::nullopt;
    default: return of;
  }
}

Multiples::Parts Multiples::parts_of(const Value* value, const Factors& factors) const {
  Parts parts;
  std::vector<const Value*> open = {value};
  std::unordered_set<const Value*> seen;
  while (!open.empty()) {
    const Value* next = open.back();
    open.pop_back();
    if (next == factors.number || next == factors.rows || !seen.insert(next).second) continue;
    if (!is_dependent(next)) {
      parts.independent.push_back(const_cast<Value*>(next));
      continue;
    }
    parts.nodes.push_back(next->producer);
    for (const Value* input : next->producer->inputs) {
      if (input != nullptr) open.push_back(input);
    }
  }
  return parts;
}

Value* Multiples::write(ops::Writer& writer, const Value* value, const Factors& factors,
                        ir::DType dtype, Written& written) const {
  if (value == factors.number || value == factors.rows) return ones(writer, value->type, dtype);
  if (!is_dependent(value)) return writer.cast(const_cast<Value*>(value), dtype);
  const auto known = written.find(value);
  if (known != written.end()) return known->second;
  return written[value] = write_dependent(writer, value, factors, dtype, written);
}

Value* Multiples::write_dependent(ops::Writer& writer, const Value* value, const Factors& factors,
                                  ir::DType dtype, Written& written) const {
  using Kind = Step::Kind;
  const Node& node = *value->producer;
  const Step step = step_of(value);
  Value* of = write(writer, step.of, factors, dtype, written);
  const auto other = [&] {
    if (step.size) return writer.reshape(writer.cast(writer.ints({*step.size}), dtype), {});
    return step.other == nullptr ? writer.scalar(step.number, dtype)
                                 : write(writer, step.other, factors, dtype, written);
  };
  switch (step.kind) {
    case Kind::kNeg: return writer.make("Neg", {of});
    case Kind::kMul: return writer.make("Mul", {of, other()});
    case Kind::kDiv: return writer.make("Div", {of, other()});
    case Kind::kAdd: return writer.make("Add", {of, other()});
    case Kind::kPow: return step.number == 1 ? of : writer.make("Mul", {of, of});
    case Kind::kWhere: {
      Value* zero = writer.scalar(0, dtype);
      const bool is_first = node.inputs[1] == step.of;
      return writer.make("Where", {step.other, is_first ? of : zero, is_first ? zero : of});
    }
    default: break;
  }
  if (ir::is(&node, "Cast") || ir::is(&node, "Identity")) return of;
  std::vector<Value*> inputs = node.inputs;
  inputs[0] = of;
  return writer.make(node.op.name, inputs, node.attrs);
}

bool Multiples::is_behind(const Node* producer, const Node& node) const {
  return producer != nullptr && positions_.at(producer) > positions_.at(&node);
}

bool Multiples::can_stand_before(const Value* value, const Node& node,
                                 std::unordered_set<const Node*>& seen) const {
  if (!is_behind(value->producer, node) || !seen.insert(value->producer).second) return true;
  if (is_dependent(value) || memory_.is_written(value) || !ops::is_pure(*value->producer))
    return false;
  const auto& inputs = value->producer->inputs;
  return ir::bodies(*value->producer).empty() &&
         std::all_of(inputs.begin(), inputs.end(), [&](const Value* input) {
           return input == nullptr ||
                  (!memory_.is_written(input) && can_stand_before(input, node, seen));
         });
}

void Multiples::move_before(ir::Graph& graph, const Value* value, Node& node) {
  if (!is_behind(value->producer, node)) return;
  for (const Value* input : value->producer->inputs) {
    if (input != nullptr) move_before(graph, input, node);
  }
  ir::move_before(graph, *value->producer, node);
  positions_[value->producer] = positions_.at(&node) - 1;
}

}  // namespace torch_ort::passes
