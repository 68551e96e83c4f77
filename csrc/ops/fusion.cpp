#include "ops/fusion.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>
#include <string_view>

namespace torch_ort::ops {

namespace {

using ir::DType;
using ir::Node;
using Kind = FusedForm::Kind;

struct PointwiseRow {
  const char* name;  // of a standard op, or of an ATen operator
  Pointwise op;
};

constexpr PointwiseRow kPointwise[] = {
    {"Abs", Pointwise::kAbs},
    {"Add", Pointwise::kAdd},
    {"And", Pointwise::kAnd},
    {"Ceil", Pointwise::kCeil},
    {"Cos", Pointwise::kCos},
    {"Div", Pointwise::kDiv},
    {"Equal", Pointwise::kEqual},
    {"Erf", Pointwise::kErf},
    {"Exp", Pointwise::kExp},
    {"Floor", Pointwise::kFloor},
    {"Greater", Pointwise::kGreater},
    {"GreaterOrEqual", Pointwise::kGreaterOrEqual},
    {"IsNaN", Pointwise::kIsNan},
    {"Less", Pointwise::kLess},
    {"LessOrEqual", Pointwise::kLessOrEqual},
    {"Log", Pointwise::kLog},
    {"Mul", Pointwise::kMul},
    {"Neg", Pointwise::kNeg},
    {"Not", Pointwise::kNot},
    {"Or", Pointwise::kOr},
    {"Pow", Pointwise::kPow},
    {"Reciprocal", Pointwise::kReciprocal},
    {"Relu", Pointwise::kRelu},
    {"Round", Pointwise::kRound},
    {"Sigmoid", Pointwise::kSigmoid},
    {"Sign", Pointwise::kSign},
    {"Sin", Pointwise::kSin},
    {"Sqrt", Pointwise::kSqrt},
    {"Sub", Pointwise::kSub},
    {"Swish", Pointwise::kSilu},
    {"Tanh", Pointwise::kTanh},
    {"Where", Pointwise::kWhere},
    {"Xor", Pointwise::kXor},
    {"aten::sigmoid_backward", Pointwise::kSigmoidGrad},
    {"aten::silu", Pointwise::kSilu},
    {"aten::silu_backward", Pointwise::kSiluGrad},
    {"aten::tanh_backward", Pointwise::kTanhGrad},
    {"aten::trunc", Pointwise::kTrunc},
};

bool is_wide_integer(DType dtype) {
  return dtype == DType::kInt64 || dtype == DType::kInt32 || dtype == DType::kInt16 ||
         dtype == DType::kInt8 || dtype == DType::kUInt8;
}

// Regions hold integers as doubles. To compare with one that is exact says the same of all others.
bool holds_integers(const Node& node, Pointwise op) {
  const auto is_lossy = [](const ir::Value* value) {
    return value->type.dtype == DType::kInt64 && !known_double(value);
  };
  const auto count = std::count_if(node.inputs.begin(), node.inputs.end(), is_lossy);
  return count <= (op == Pointwise::kWhere ? 0 : 1);
}

bool is_number(DType dtype) {
  return ir::is_float(dtype) || is_wide_integer(dtype) || dtype == DType::kBool;
}

bool all_inputs(const Node& node, bool (*holds)(DType)) {
  return std::all_of(node.inputs.begin(), node.inputs.end(), [holds](const ir::Value* value) {
    return value != nullptr && holds(value->type.dtype);
  });
}

FusedForm pointwise(Pointwise op, std::vector<double> constants = {}) {
  return {Kind::kPointwise, op, std::move(constants)};
}

// Python's numbers arrive as integers or as real ones.
double number_attr(const Node& node, std::string_view name) {
  const auto found = node.attrs.find(name);
  if (found == node.attrs.end()) return 0;
  const auto* integer = std::get_if<ir::Dim>(&found->second);
  return integer != nullptr ? static_cast<double>(integer->constant())
                            : ir::float_attr(node.attrs, name, 0);
}

FusedForm cast_form(const Node& node) {
  const DType from = node.inputs[0]->type.dtype, to = node.outputs[0]->type.dtype;
  if (!is_number(from) || !is_number(to)) return {};
  if (to == DType::kBool) return pointwise(Pointwise::kToBool);
  if (ir::is_float(to)) return {Kind::kPass};
  if (from == DType::kBool || from == to) return {Kind::kPass};
  // Casts between integers wrap around; those of NaN and infinity differ between processors.
  return {};
}

FusedForm gelu_form(const Node& node, Pointwise exact, Pointwise tanh) {
  return pointwise(ir::string_attr(node.attrs, "approximate", "none") == "tanh" ? tanh : exact);
}

FusedForm reduction_form(const Node& node, Kind kind) {
  if (!ir::is_float(node.inputs[0]->type.dtype) || !reduction_axes(node)) return {};
  return {kind};
}

// Parts of equal sizes, so that all of them have the rows and columns of one region.
FusedForm concat_form(const Node& node) {
  const ir::Type& first = node.inputs[0]->type;
  const bool are_equal =
      std::all_of(node.inputs.begin(), node.inputs.end(), [&](const ir::Value* value) {
        return value != nullptr && value->type.dtype == first.dtype &&
               *value->type.shape == *first.shape;
      });
  if (!are_equal || node.inputs.size() < 2) return {};
  return ir::is_float(first.dtype) || first.dtype == DType::kBool ? FusedForm{Kind::kConcat}
                                                                  : FusedForm();
}

// Rows, for which memory is read where they lie. One known row is a view.
FusedForm gather_form(const Node& node) {
  const ir::Type &table = node.inputs[0]->type, &ids = input(node, 1).type;
  const bool names_rows = ids.dtype == DType::kInt64 || ids.dtype == DType::kInt32;
  if (!ir::is_float(table.dtype) || !names_rows || ids.shape->empty()) return {};
  const auto rank = static_cast<int64_t>(table.shape->size());
  if (rank < 2 || wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank) != 0) return {};
  return {Kind::kGather};
}

FusedForm own_form(const Node& node) {
  if (node.op.name == "RowPick") return {Kind::kPick};
  if (node.op.name == "RowScatter") return {Kind::kScatter};
  if (node.op.name == "RowValid") return {Kind::kValid};
  if (node.op.name == "PhiloxMask") return {Kind::kRandom};
  if (node.op.name == "MulAdd" && all_inputs(node, ir::is_float)) {
    return pointwise(Pointwise::kMulAdd);
  }
  return {};
}

}  // namespace

FusedForm fused_form(const Node& node) {
  for (const ir::Value* value : node.outputs) {
    if (value == nullptr || !value->type.is_known() || !is_number(value->type.dtype)) return {};
  }
  for (const ir::Value* value : node.inputs) {
    if (value != nullptr && !value->type.is_known()) return {};
  }
  if (node.outputs.size() != 1 || node.inputs.empty() || node.inputs[0] == nullptr) return {};
  if (node.op.domain == ir::kTorchOrtDomain) return own_form(node);

  const std::string key = key_of(node);
  if (key == "Cast") return cast_form(node);
  if (key == "Identity" || key == "Reshape" || key == "Unsqueeze" || key == "Squeeze") {
    return {Kind::kPass};
  }
  if (key == "Concat") return concat_form(node);
  if (key == "Gather") return gather_form(node);
  if (key == "ReduceSum") return reduction_form(node, Kind::kSum);
  if (key == "ReduceMean") return reduction_form(node, Kind::kMean);
  if (key == "ReduceMax") return reduction_form(node, Kind::kMax);
  if (key == "ReduceMin") return reduction_form(node, Kind::kMin);
  if (!all_inputs(node, is_number)) return {};
  if (key == "Gelu") return gelu_form(node, Pointwise::kGelu, Pointwise::kGeluTanh);
  if (key == "aten::gelu_backward") {
    return gelu_form(node, Pointwise::kGeluGrad, Pointwise::kGeluTanhGrad);
  }
  if (key == "aten::threshold_backward") {
    return pointwise(Pointwise::kThresholdGrad, {number_attr(node, "threshold")});
  }
  if ((key == "Min" || key == "Max") && node.inputs.size() == 2 && all_inputs(node, ir::is_float)) {
    return pointwise(key == "Min" ? Pointwise::kMin : Pointwise::kMax);
  }
  const auto* row = std::find_if(std::begin(kPointwise), std::end(kPointwise),
                                 [&](const PointwiseRow& each) { return key == each.name; });
  if (row == std::end(kPointwise)) return {};
  if (word(row->op).on_integers ? !holds_integers(node, row->op) : !all_inputs(node, ir::is_float))
    return {};
  if (static_cast<int>(node.inputs.size()) != word(row->op).num_operands) return {};
  if (key == "Swish" && ir::float_attr(node.attrs, "alpha", 1) != 1) return {};
  return pointwise(row->op);
}

bool wants_double(const Node& node, const FusedForm& form) {
  const auto is_wide = [](const ir::Value* value) {
    const DType dtype = value->type.dtype;
    return dtype == DType::kDouble || dtype == DType::kInt64 || dtype == DType::kInt32;
  };
  if (form.has_label()) return node.outputs[0]->type.dtype == DType::kDouble;
  if (form.kind == Kind::kRandom) return false;
  // Axes and shapes are integers, but no operands.
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
  if (!number) return std::nullopt;
  if (const auto* truth = std::get_if<bool>(&number->value)) return *truth ? 1.0 : 0.0;
  if (const auto* real = std::get_if<double>(&number->value)) return *real;
  const auto* integer = std::get_if<ir::Dim>(&number->value);
  if (integer == nullptr || !integer->is_constant()) return std::nullopt;
  // Only as far as no other integer becomes the same double.
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
