#include "ops/attributes.h"

#include "base/error.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <unordered_map>

namespace torch_ort::ops {

namespace {

using enum AttrKind;
using Rules = std::vector<AttrRule>;

const Rules kNone = {};
const Rules kAlpha = {{"alpha", kFloat}};
const Rules kAxis = {{"axis", kInt}};
const Rules kBorder = {{"full_shape_outputs", kInts}, {"non_differentiable_outputs", kInts}};
const Rules kBranches = {{"then_branch", kGraph, true}, {"else_branch", kGraph, true}};
const Rules kIgnored = {{"ignore_index", kInt}};

const Rules kAttention = {
    {"scale", kFloat},       {"fill", kFloat}, {"is_causal", kInt},
    {"unseen_is_nan", kInt}, {"keep", kFloat}, {"stream", kInt},
};

Rules operator+(Rules a, const Rules& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Rules kWindow = {{"auto_pad", kString},
                       {"dilations", kInts},
                       {"kernel_shape", kInts},
                       {"pads", kInts},
                       {"strides", kInts}};
const Rules kReduction = {{"axes", kInts}, {"keepdims", kInt}, {"noop_with_empty_axes", kInt}};
const Rules kPlace = {{"axis", kInt}, {"keepdims", kInt}, {"select_last_index", kInt}};
const Rules kRowNorm = {{"axis", kInt}, {"epsilon", kFloat}, {"stash_type", kInt}};

// A standard op that does not stand here has no attributes.
const std::unordered_map<std::string_view, Rules>& standard_rules() {
  static const std::unordered_map<std::string_view, Rules> rules = {
      {"ArgMax", kPlace},
      {"ArgMin", kPlace},
      {"Attention",
       {{"is_causal", kInt},
        {"kv_num_heads", kInt},
        {"left_window_size", kInt},
        {"q_num_heads", kInt},
        {"qk_matmul_output_mode", kInt},
        {"right_window_size", kInt},
        {"scale", kFloat},
        {"softcap", kFloat},
        {"softmax_precision", kInt}}},
      {"AveragePool", kWindow + Rules{{"ceil_mode", kInt}, {"count_include_pad", kInt}}},
      {"BatchNormalization", {{"epsilon", kFloat}, {"momentum", kFloat}, {"training_mode", kInt}}},
      {"Cast", {{"to", kInt, true}, {"round_mode", kString}, {"saturate", kInt}}},
      {"Concat", {{"axis", kInt, true}}},
      {"Constant",
       {{"value", kTensor},
        {"value_float", kFloat},
        {"value_floats", kFloats},
        {"value_int", kInt},
        {"value_ints", kInts},
        {"value_string", kString},
        {"value_strings", kStrings}}},
      {"ConstantOfShape", {{"value", kTensor}}},
      {"Conv", kWindow + Rules{{"group", kInt}}},
      {"ConvTranspose",
       kWindow + Rules{{"group", kInt}, {"output_padding", kInts}, {"output_shape", kInts}}},
      {"CumSum", {{"exclusive", kInt}, {"reverse", kInt}}},
      {"Dropout", {{"seed", kInt}}},
      {"Elu", kAlpha},
      {"Flatten", kAxis},
      {"Gather", kAxis},
      {"GatherElements", kAxis},
      {"Gelu", {{"approximate", kString}}},
      {"Gemm", {{"alpha", kFloat}, {"beta", kFloat}, {"transA", kInt}, {"transB", kInt}}},
      {"GroupNormalization",
       {{"num_groups", kInt, true}, {"epsilon", kFloat}, {"stash_type", kInt}}},
      {"HardSigmoid", {{"alpha", kFloat}, {"beta", kFloat}}},
      {"If", kBranches},
      {"IsInf", {{"detect_negative", kInt}, {"detect_positive", kInt}}},
      {"LayerNormalization", kRowNorm},
      {"LeakyRelu", kAlpha},
      {"LogSoftmax", kAxis},
      {"Loop", {{"body", kGraph, true}}},
      {"MaxPool", kWindow + Rules{{"ceil_mode", kInt}, {"storage_order", kInt}}},
      {"Mod", {{"fmod", kInt}}},
      {"NegativeLogLikelihoodLoss", {{"ignore_index", kInt}, {"reduction", kString}}},
      {"Pad", {{"mode", kString}}},
      {"RMSNormalization", kRowNorm},
      {"Range", {{"stash_type", kInt}}},
      {"ReduceL1", kReduction},
      {"ReduceL2", kReduction},
      {"ReduceLogSumExp", kReduction},
      {"ReduceMax", kReduction},
      {"ReduceMean", kReduction},
      {"ReduceMin", kReduction},
      {"ReduceProd", kReduction},
      {"ReduceSum", kReduction},
      {"Reshape", {{"allowzero", kInt}}},
      {"Resize",
       {{"antialias", kInt},
        {"axes", kInts},
        {"coordinate_transformation_mode", kString},
        {"cubic_coeff_a", kFloat},
        {"exclude_outside", kInt},
        {"extrapolation_value", kFloat},
        {"keep_aspect_ratio_policy", kString},
        {"mode", kString},
        {"nearest_mode", kString}}},
      {"ScatterElements", {{"axis", kInt}, {"reduction", kString}}},
      {"Selu", {{"alpha", kFloat}, {"gamma", kFloat}}},
      {"Shape", {{"end", kInt}, {"start", kInt}}},
      {"Softmax", kAxis},
      {"Split", {{"axis", kInt}, {"num_outputs", kInt}}},
      {"Swish", kAlpha},
      {"Transpose", {{"perm", kInts}}},
      {"Trilu", {{"upper", kInt}}},
  };
  return rules;
}

const std::unordered_map<std::string_view, Rules>& own_rules() {
  static const std::unordered_map<std::string_view, Rules> rules = {
      {"Attention", kAttention},
      {"AttentionGrad", kAttention},
      {"BernoulliMask", {{"keep", kFloat}}},
      {"Dims", {{"dims", kDims}}},
      {"EmbeddingGrad", {{"padding_idx", kInt}}},
      {"If", kBranches},
      {"Loop", {{"body", kGraph, true}, {"carried", kInt}}},
      {"PhiloxMask", {{"keep", kFloat}, {"stream", kInt}}},
      {"Region",
       {{"body", kGraph, true}, {"columns", kDim}, {"rows", kDim}, {"spaces", kStrings, true}}},
      {"RowPick", kIgnored},
      {"RowScatter", kIgnored},
      {"RowValid", kIgnored},
      {"SizeRatio", {{"denominator", kDim}, {"factor", kFloat}, {"numerator", kDim}}},
  };
  return rules;
}

bool is_number_text(const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

}  // namespace

const std::vector<AttrRule>* attribute_rules(const ir::OpId& op) {
  if (op.domain == ir::kMicrosoftDomain && op.name == "YieldOp") return &kBorder;
  if (op.domain != "" && op.domain != ir::kTorchOrtDomain) return nullptr;
  const auto& rules = op.domain.empty() ? standard_rules() : own_rules();
  const auto found = rules.find(op.name);
  return found == rules.end() ? &kNone : &found->second;
}

const char* text_of(AttrKind kind) {
  static constexpr const char* kTexts[] = {"an integer", "a list of integers",
                                           "a size",     "a list of sizes",
                                           "a float",    "a list of floats",
                                           "a string",   "a list of strings",
                                           "a tensor",   "a graph"};
  return kTexts[static_cast<size_t>(kind)];
}

bool is_of_kind(const ir::Attr& attr, AttrKind kind, bool may_be_text) {
  const auto* text = std::get_if<std::string>(&attr);
  const auto* texts = std::get_if<std::vector<std::string>>(&attr);
  switch (kind) {
    case kInt: {
      const auto* dim = std::get_if<ir::Dim>(&attr);
      return dim != nullptr && dim->is_constant();
    }
    case kInts: {
      const auto* dims = std::get_if<ir::Shape>(&attr);
      return dims != nullptr && ir::is_constant(*dims);
    }
    case kDim: return std::holds_alternative<ir::Dim>(attr) || text != nullptr;
    case kDims: return std::holds_alternative<ir::Shape>(attr) || texts != nullptr;
    case kFloat:
      return std::holds_alternative<double>(attr) ||
             (may_be_text && text != nullptr && is_number_text(*text));
    case kFloats:
      return std::holds_alternative<std::vector<double>>(attr) ||
             (may_be_text && texts != nullptr &&
              std::all_of(texts->begin(), texts->end(), is_number_text));
    case kString: return text != nullptr;
    case kStrings: return texts != nullptr;
    case kTensor: return std::holds_alternative<std::shared_ptr<const ir::TensorData>>(attr);
    case kGraph: return std::holds_alternative<std::shared_ptr<ir::Graph>>(attr);
  }
  return false;
}

}  // namespace torch_ort::ops
