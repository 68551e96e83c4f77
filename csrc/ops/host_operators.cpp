#include "ops/host_operators.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace torch_ort::ops {

namespace {

// Operators of ATen whose kernels on CUDA do so without a tag that says it. Those whose sizes
// depend on data are known by their unbacked symbols.
constexpr std::array<std::string_view, 9> kReading = {
    "aten::_ctc_loss",
    "aten::bincount",
    "aten::embedding_renorm_",
    "aten::histc",
    "aten::mode",
    "aten::multinomial",
    "aten::_pack_padded_sequence",
    "aten::segment_reduce",
    "aten::_segment_reduce_backward",
};
// Libraries of linear algebra copy status words to the host.
constexpr std::array<std::string_view, 7> kFamilies = {
    "aten::linalg_", "aten::_linalg_", "aten::cholesky",         "aten::geqrf",
    "aten::lu_",     "aten::ormqr",    "aten::triangular_solve",
};
constexpr std::array<std::string_view, 3> kNamespaces = {"aten", "prims", "torch_ort"};

}  // namespace

std::string why_host_is_needed(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  const std::string_view of = std::string_view(name).substr(0, name.find("::"));
  if (std::find(kNamespaces.begin(), kNamespaces.end(), of) == kNamespaces.end()) {
    return "PyTorch does not define the operator, which might ask the host";
  }
  if (op.hasTag(at::Tag::cudagraph_unsafe)) return "its tag cudagraph_unsafe";
  const bool reads = std::find(kReading.begin(), kReading.end(), name) != kReading.end() ||
                     std::any_of(kFamilies.begin(), kFamilies.end(),
                                 [&](std::string_view each) { return name.starts_with(each); });
  if (reads || op.hasTag(at::Tag::data_dependent_output)) return "the host reads a number of it";
  return "";
}

}  // namespace torch_ort::ops
