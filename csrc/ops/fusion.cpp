#include "ops/fusion.h"

#include "base/error.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>

namespace torch_ort::ops {

namespace {

using ir::DType;
using ir::Node;
using Kind = FusedForm::Kind;

// Regions compute integers as doubles. A comparison is exact if at least one of the integers is.
bool holds_integers(const Node& node, Pointwise op) {
  const auto is_lossy = [](const ir::Value* value) {
    return value->type.dtype == DType::kInt64 && !known_double(value);
  };
  const auto count = std::count_if(node.inputs.begin(), node.inputs.end(), is_lossy);
  return count <= (op == Pointwise::kWhere ? 0 : 1);
}

bool all_inputs(const Node& node, bool (*holds)(DType)) {
  return std::all_of(node.inputs.begin(), node.inputs.end(), [holds](const ir::Value* value) {
    return value != nullptr && holds(value->type.dtype);
  });
}

FusedForm reduction_form(const Node& node, Kind kind) {
  if (!ir::is_float(node.inputs[0]->type.dtype) || !reduction_axes(node)) return {};
  return {kind};
}

}  // namespace

FusedForm pointwise_form(const Node& node, Pointwise op, std::vector<double> constants) {
  const PointwiseWord& row = word(op);
  if (!all_inputs(node, ir::is_number_or_bool)) return {};
  if (row.on_integers ? !holds_integers(node, op) : !all_inputs(node, ir::is_float)) return {};
  const auto count = static_cast<int>(node.inputs.size() + constants.size());
  return count == row.num_operands ? FusedForm{Kind::kPointwise, op, std::move(constants)}
                                   : FusedForm();
}

FusedForm fused_form(const Node& node) {
  for (const ir::Value* value : node.outputs) {
    if (value == nullptr || !value->type.is_known() || !is_number_or_bool(value->type.dtype))
      return {};
  }
  for (const ir::Value* value : node.inputs) {
    if (value != nullptr && !value->type.is_known()) return {};
  }
  if (node.outputs.size() != 1 || node.inputs.empty() || node.inputs[0] == nullptr) return {};
  const FusedRule& rule = work_of(node).fused;
  if (const auto* op = std::get_if<Pointwise>(&rule)) return pointwise_form(node, *op);
  if (const auto* kind = std::get_if<Kind>(&rule)) {
    const FusedForm form{*kind};
    return form.is_reduction() ? reduction_form(node, *kind) : form;
  }
  if (const auto* function = std::get_if<FusedFunction>(&rule)) return (*function)(node);
  return {};
}

bool wants_double(const Node& node, const FusedForm& form) {
  const auto is_wide = [](const ir::Value* value) {
    const DType dtype = value->type.dtype;
    return dtype == DType::kDouble || dtype == DType::kInt64 || dtype == DType::kInt32;
  };
  if (form.has_label()) return node.outputs[0]->type.dtype == DType::kDouble;
  if (form.kind == Kind::kRandom) return false;
  // Other inputs are axes and shapes: integers, but not operands.
  const size_t count = form.kind == Kind::kPointwise ? node.inputs.size() : 1;
  for (size_t i = 0; i < std::min(count, node.inputs.size()); ++i) {
    if (node.inputs[i] != nullptr && is_wide(node.inputs[i])) return true;
  }
  return node.outputs[0]->type.dtype == DType::kDouble;
}

std::optional<std::vector<int64_t>> reduction_axes(const Node& node) {
  if (ir::has_attr(node.attrs, "axes")) return std::nullopt;
  const auto rank = static_cast<int64_t>(node.inputs[0]->type.shape->size());
  std::vector<int64_t> axes;
  if (has_input(node, 1)) {
    if (!has_known_ints(node.inputs[1])) return std::nullopt;
    axes = wrap_axes(node, known_ints(node.inputs[1]), rank);
  }
  if (axes.empty()) {
    if (ir::int_attr(node.attrs, "noop_with_empty_axes", 0) != 0) return std::nullopt;
    for (int64_t axis = 0; axis < rank; ++axis) axes.push_back(axis);
  }
  std::sort(axes.begin(), axes.end());
  return axes;
}

std::optional<double> known_double(const ir::Value* value) {
  const std::optional<Arg> number = known_number(value);
  return number ? as_double(*number) : std::nullopt;
}

std::optional<double> as_double(const Arg& number) {
  if (const auto* truth = std::get_if<bool>(&number.value)) return *truth ? 1.0 : 0.0;
  if (const auto* real = std::get_if<double>(&number.value)) return *real;
  const auto* integer = std::get_if<ir::Dim>(&number.value);
  if (integer == nullptr || !integer->is_constant()) return std::nullopt;
  // Only up to the size from which different integers become the same double.
  constexpr int64_t kExact = int64_t{1} << 53;
  const int64_t exact = integer->constant();
  if (exact >= kExact || exact <= -kExact) return std::nullopt;
  return static_cast<double>(exact);
}

SizeRatio size_ratio(const Node& node) {
  return {ir::float_attr(node.attrs, "factor", 1), ir::dim_attr(node.attrs, "numerator", 1),
          ir::dim_attr(node.attrs, "denominator", 1)};
}

const ir::Graph& region_body(const Node& region) {
  const auto found = region.attrs.find("body");
  const auto* body = found == region.attrs.end()
                         ? nullptr
                         : std::get_if<std::shared_ptr<ir::Graph>>(&found->second);
  ORT_CHECK(body != nullptr && *body != nullptr, "Region: the node has no body");
  return **body;
}

}  // namespace torch_ort::ops
