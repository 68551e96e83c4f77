#include "ops/function.h"

#include "base/error.h"
#include "ops/shapes.h"

#include <algorithm>
#include <atomic>
#include <limits>

namespace torch_ort::ops {

namespace {

using ir::Node;
using ir::Type;

std::atomic<FunctionTypes> function_types = nullptr;

std::vector<int> numbers_of(const Node& node) {
  std::vector<int> slots;
  for (const ir::Dim& slot : ir::ints_attr(node.attrs, kFunctionNumbers, {})) {
    if (slot.is_constant()) slots.push_back(static_cast<int>(slot.constant()));
  }
  return slots;
}

std::vector<Type> infer_function(const Node& node) {
  const FunctionTypes types = function_types.load();
  const std::vector<int> numbers = numbers_of(node);
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const ir::Value* value = node.inputs[i];
    if (value == nullptr) continue;
    const bool is_number = std::count(numbers.begin(), numbers.end(), static_cast<int>(i)) > 0;
    // What is not known yet may be so when sizes have been read (passes/read_sizes.cpp).
    if (is_number && !has_known_ints(value) && constant_data(*value) == nullptr) return {};
    if (!is_number && !(value->type.is_known() && value->type.shape)) return {};
  }
  return types == nullptr ? std::vector<Type>() : types(node);
}

// The numbers of an input: sizes, or the elements of a constant.
Arg numbers(const Node& node, ir::Value* value) {
  if (has_known_ints(value)) return Arg::list(known_ints(value));
  return known_numbers(node, *value);
}

void lower_function(const Node& node, CallList& calls) {
  ArgList args;
  for (ir::Value* value : node.inputs) args.push_back(value);
  for (const int slot : numbers_of(node)) {
    const bool is_given = has_input(node, slot);
    if (is_given) args[slot] = numbers(node, node.inputs[slot]);
  }
  calls.add(concat(node.op.domain, "::", node.op.name), "", std::move(args), node.outputs);
}

}  // namespace

bool is_function(const ir::OpId& op) {
  const std::string_view domain = op.domain;
  return domain.starts_with(kFunctionDomain) &&
         (domain.size() == kFunctionDomain.size() || domain[kFunctionDomain.size()] == '.');
}

void set_function_types(FunctionTypes types) { function_types = types; }

Op function_op() {
  Op function;
  function.domain = kFunctionDomain;
  function.min_inputs = 0;
  function.max_inputs = std::numeric_limits<int>::max();
  function.max_outputs = -1;
  function.any_attributes = true;
  function.infer = infer_function;
  function.lower = lower_function;
  function.int_inputs_of = numbers_of;
  function.pure_of = [](const Node& node) {
    return ir::int_attr(node.attrs, kFunctionDraws, 0) == 0;
  };
  return function;
}

}  // namespace torch_ort::ops
