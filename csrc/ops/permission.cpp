#include "ops/permission.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/op.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace torch_ort::ops {

namespace {

using c10::TypeKind;

// What schemas do not state. A pattern is a whole name, or parts of names between asterisks.
struct NameRule {
  const char* reason;
  std::vector<std::string_view> patterns;
};

const NameRule kNameRules[] = {
    {"which reads or writes outside of the graph", {"from_file", "_print"}},
    {"which takes sizes and strides without a look at the memory behind them",
     {"_reshape_alias", "_reshape_alias_copy"}},
    {"which changes the memory of a tensor, or what autograd knows of it",
     {"_lazy_clone", "_resize_output", "resize*", "set", "set_*"}},
    {"whose tensors are not dense",
     {"*sparse*", "*nested*", "*coalesce*", "*crow_indices*", "*ccol_indices*", "*col_indices*",
      "*row_indices*", "hspmm", "indices*", "smm", "sspaddmm", "to_dense*", "values*"}},
    {"whose tensors hold what another kernel has packed, which nobody checks",
     {"*fbgemm*", "*mkldnn*", "*mps*", "*quantized*", "*vulkan*", "choose_qparams*", "dequantize",
      "int_repr", "q_*", "qscheme", "quantize_*"}},
    {"which changes state of the process", {"*cufft*", "*pin_memory*"}},
};

// Names with an underscore are internal to PyTorch. These are the ones that graphs of autograd and
// of modules call.
constexpr std::string_view kInternal[] = {
    "_adaptive_avg_pool*",
    "_addmm_activation",
    "_aminmax",
    "_assert_*",
    "_batch_norm_with_update*",
    "_cdist_*",
    "_cholesky_solve_helper",
    "_chunk_cat",
    "_conj*",
    "_ctc_loss*",
    "_cudnn_rnn*",
    "_dirichlet_grad",
    "_efficientzerotensor",
    "_embedding_bag*",
    "_euclidean_dist",
    "_fake_quantize_*",
    "_fft_*",
    "_foreach_*",
    "_functional_*",
    "_fused_dropout",
    "_fused_rms_norm*",
    "_grouped_mm",
    "_int_mm",
    "_is_all_true",
    "_is_any_true",
    "_linalg_*",
    "_local_scalar_dense",
    "_log_softmax*",
    "_logcumsumexp",
    "_make_dep_token",
    "_masked_scale",
    "_native_batch_norm_legit*",
    "_neg_view*",
    "_pdist_*",
    "_prelu_kernel*",
    "_reshape_copy",
    "_safe_softmax",
    "_sample_dirichlet",
    "_scaled_dot_product_*",
    "_scaled_mm",
    "_softmax*",
    "_standard_gamma*",
    "_thnn_fused_*",
    "_to_copy",
    "_trilinear",
    "_unique",
    "_unique2",
    "_unsafe_index*",
    "_unsafe_view",
    "_upsample_*",
    "_weight_norm_interface*",
};

bool matches(std::string_view name, std::string_view pattern) {
  const bool is_open_before = pattern.starts_with('*'), is_open_after = pattern.ends_with('*');
  if (is_open_before) pattern.remove_prefix(1);
  if (is_open_after) pattern.remove_suffix(1);
  if (is_open_before && is_open_after) return name.find(pattern) != std::string_view::npos;
  if (is_open_after) return name.starts_with(pattern);
  return name == pattern;
}

c10::TypePtr innermost(c10::TypePtr type) {
  while (true) {
    if (type->kind() == TypeKind::OptionalType) {
      type = type->castRaw<c10::OptionalType>()->getElementType();
    } else if (type->kind() == TypeKind::ListType) {
      type = type->castRaw<c10::ListType>()->getElementType();
    } else {
      return type;
    }
  }
}

// Whether a node can give the argument. An optional one of another type is left out.
bool is_plain(const c10::Argument& argument) {
  switch (innermost(argument.type())->kind()) {
    case TypeKind::TensorType:
    case TypeKind::NumberType:
    case TypeKind::FloatType:
    case TypeKind::IntType:
    case TypeKind::SymIntType:
    case TypeKind::BoolType:
    case TypeKind::StringType:
    case TypeKind::DeviceObjType: return true;
    default: return argument.type()->kind() == TypeKind::OptionalType;
  }
}

std::string reason_of_schema(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return "which writes into its arguments";
  for (const c10::Argument& argument : schema.arguments()) {
    if (!is_plain(argument)) return concat("which takes a ", argument.type()->str());
  }
  // These are called because they raise errors or read numbers, not for tensors.
  if (registry().operator_row(schema.name()).raises_or_reads_back) return "";
  if (schema.returns().empty()) return "which gives nothing";
  for (const c10::Argument& result : schema.returns()) {
    if (innermost(result.type())->kind() != TypeKind::TensorType) {
      return concat("which gives a ", result.type()->str());
    }
  }
  return "";
}

}  // namespace

std::string reason_to_refuse(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  if (!is_pytorchs(name)) return "which is none of PyTorch's own";
  name.remove_prefix(name.find(':') + 2);
  for (const NameRule& rule : kNameRules) {
    for (std::string_view pattern : rule.patterns) {
      if (matches(name, pattern)) return rule.reason;
    }
  }
  const auto is_known = [name](std::string_view pattern) { return matches(name, pattern); };
  const bool is_internal = name.starts_with('_') && !name.starts_with("__");
  if (is_internal && std::none_of(std::begin(kInternal), std::end(kInternal), is_known)) {
    return "which PyTorch keeps for itself";
  }
  return reason_of_schema(op.schema());
}

}  // namespace torch_ort::ops
