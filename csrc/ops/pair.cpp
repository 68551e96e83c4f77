#include "ops/pair.h"

#include "ops/op.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

// What a node says of an argument.
Arg argument_of(const ir::Node& node, const Pair::Argument& argument) {
  if (argument.attribute == nullptr) return argument.value;
  const auto* number = std::get_if<double>(&argument.value.value);
  if (number != nullptr) return ir::float_attr(node.attrs, argument.attribute, *number);
  const auto* text = std::get_if<std::string>(&argument.value.value);
  if (text != nullptr) return ir::string_attr(node.attrs, argument.attribute, *text);
  const auto* truth = std::get_if<bool>(&argument.value.value);
  if (truth != nullptr) return ir::int_attr(node.attrs, argument.attribute, *truth ? 1 : 0) != 0;
  const int64_t missing = std::get<ir::Dim>(argument.value.value).constant();
  const int64_t integer = ir::int_attr(node.attrs, argument.attribute, missing);
  if (!argument.is_axis) return integer;
  const auto rank = static_cast<int64_t>(known_shape(node, input(node, 0)).size());
  return wrap_axis(node, integer, rank);
}

}  // namespace

void lower_pair(const ir::Node& node, CallList& calls) {
  const Pair& pair = registry().find(node.op)->pairs.at(0);
  ArgList args(node.inputs.begin(), node.inputs.end());
  for (const Pair::Argument& argument : pair.arguments) {
    args.push_back(argument_of(node, argument));
  }
  calls.add(pair.aten, pair.overloads[0], std::move(args), {node.outputs[0]});
}

}  // namespace torch_ort::ops
