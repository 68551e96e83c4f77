#include "capture/overlapping_writes.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_ort::capture {

namespace {

thread_local OverlappingWrites* innermost = nullptr;

// Whether the operator has the name of one that writes: "aten::add_", and "aten::__iand__", but not
// "aten::__and__".
bool is_written_by_name(std::string_view name) {
  name.remove_prefix(std::min(name.size(), name.rfind(':') + 1));
  if (name.starts_with("__")) return name.starts_with("__i");
  return name.ends_with('_');
}

// Whether the operator changes only how the tensor lies in its memory.
bool keeps_numbers(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  const auto handle =
      name ? c10::Dispatcher::singleton().findSchema(*name) : std::optional<c10::OperatorHandle>();
  return !handle || handle->hasTag(at::Tag::inplace_view);
}

// Whether strides alone tell that elements share memory: one is 0, or the elements along one dim
// reach beyond the stride of the next.
bool overlaps(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  bool are_known = true;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const auto size = tensor.sym_sizes()[dim].maybe_as_int();
    const auto stride = tensor.sym_strides()[dim].maybe_as_int();
    if (size && *size == 0) return false;
    if (size && *size == 1) continue;
    if (stride && *stride == 0) return true;
    are_known = are_known && size && stride;
    if (are_known) dims.emplace_back(*stride, *size);
  }
  if (!are_known) return false;
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // the distance between the first and the last element so far
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

bool may_overlap(const c10::IValue& written) {
  if (written.isTensor()) {
    const at::Tensor& tensor = written.toTensor();
    return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_nested() &&
           overlaps(tensor);
  }
  if (!written.isTensorList()) return false;
  const auto tensors = written.toTensorVector();
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return may_overlap(tensor); });
}

}  // namespace

struct OverlapObserver {
  // Called before each operator.
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& call) {
    if (innermost == nullptr || !is_written_by_name(call.name())) return nullptr;
    const auto inputs = call.inputs();
    if (inputs.empty() || !may_overlap(inputs[0]) || keeps_numbers(call)) return nullptr;
    innermost->report_(call.name());
    return nullptr;
  }
};

OverlappingWrites::OverlappingWrites(Report report)
    : report_(std::move(report)), outer_(std::exchange(innermost, this)) {
  if (outer_ != nullptr) return;
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(OverlapObserver::start)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

OverlappingWrites::~OverlappingWrites() {
  if (outer_ == nullptr) at::removeCallback(callback_);
  innermost = outer_;
}

}  // namespace torch_ort::capture
