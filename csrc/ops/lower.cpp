// A graph as the calls that compute it, and the integers that rules and lowerings read.
#include "base/error.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>

namespace torch_ort::ops {

namespace {

bool is_dims(const ir::Value& value) { return ir::is(value.producer, "Dims", ir::kTorchOrtDomain); }

bool is_known_shape(const ir::Value& value) {
  return ir::is(value.producer, "Shape") && has_input(*value.producer, 0) &&
         value.producer->inputs[0]->type.shape;
}

// Where an error occurred: the node, and the line of the user's program if it is known.
std::string place(const ir::Node& node) {
  return concat(" (node '", node.name, "'", node.origin.empty() ? "" : ", ", node.origin, ")");
}

void lower_node(const ir::Graph& graph, const ir::Node& node, CallList& calls) {
  const Op* op = registry().find(node.op);
  if (op == nullptr || op->lower == nullptr) {
    throw Unsupported(concat(node.op.str(), ": no kernel has this name"));
  }
  if (graph.opset > 0 && first_opset(node) > graph.opset) {
    throw Unsupported(concat(node.op.str(), ": opset of the graph: got ", graph.opset, ", want ",
                             first_opset(node), " or newer"));
  }
  const auto count = static_cast<int>(node.inputs.size());
  if (count < op->min_inputs || (op->max_inputs >= 0 && count > op->max_inputs)) {
    throw UserError(concat(node.op.str(), ": inputs: got ", count, ", want ", op->min_inputs,
                           " to ", op->max_inputs));
  }
  op->lower(node, calls);
}

}  // namespace

CallList lower(const ir::Graph& graph, size_t& yield_position) {
  CallList calls;
  bool has_yield = false;
  for (const ir::Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) {
      yield_position = calls.calls.size();
      has_yield = true;
      continue;
    }
    const size_t first = calls.calls.size();
    try {
      lower_node(graph, node, calls);
    } catch (const Unsupported& error) {
      throw Unsupported(error.what() + place(node));
    } catch (const UserError& error) {
      throw UserError(error.what() + place(node));
    }
    for (size_t i = first; i < calls.calls.size(); ++i) calls.calls[i].node = &node;
  }
  if (!has_yield) yield_position = calls.calls.size();
  return calls;
}

bool has_known_ints(const ir::Value* value) {
  if (value == nullptr) return false;
  if (is_dims(*value) || is_known_shape(*value)) return true;
  const auto data = constant_data(*value);
  return data != nullptr &&
         (data->dtype == ir::DType::kInt64 || data->dtype == ir::DType::kInt32) &&
         (data->bytes != nullptr || data->num_bytes == 0);
}

ir::Shape known_ints(const ir::Value* value) {
  ORT_CHECK(value != nullptr, "known_ints: the input is left out");
  if (is_dims(*value)) return ir::ints_attr(value->producer->attrs, "dims", {});
  if (is_known_shape(*value)) return part_of_shape(*value->producer);
  if (!has_known_ints(value)) {
    throw Unsupported(concat("'", value->name, "' depends on data, want constant integers"));
  }
  const auto data = constant_data(*value);
  const auto count = static_cast<int64_t>(data->num_bytes) / ir::size_bytes(data->dtype);
  ir::Shape ints;
  for (int64_t i = 0; i < count; ++i) ints.push_back(std::get<ir::Dim>(element(*data, i).value));
  return ints;
}

}  // namespace torch_ort::ops
