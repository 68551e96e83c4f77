#include "run/memory/spoil.h"

#include <algorithm>
#include <cstring>

namespace torch_ort::run {

namespace {

struct Bytes {
  const char* begin;
  const char* end;
};

Bytes bytes_of(const at::Tensor& tensor) {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + spec_of(tensor).bytes};
}

bool overlap(const Bytes& a, const Bytes& b) { return a.begin < b.end && b.begin < a.end; }

}  // namespace

void spoil_results(const Context& context, const Step& step) {
  std::vector<Bytes> operands;
  for (int slot : step.reads()) {
    const at::Tensor& operand = context.slots[slot];
    const bool has_bytes = operand.defined() && operand.has_storage() && operand.device().is_cpu();
    if (has_bytes) operands.push_back(bytes_of(operand));
  }
  for (int slot : step.outputs) {
    if (slot < 0) continue;
    const at::Tensor& result = context.slots[slot];
    if (!result.device().is_cpu() || result.numel() == 0) continue;
    if (!is_dense(spec_of(result))) continue;
    const Bytes bytes = bytes_of(result);
    const bool is_read = std::any_of(operands.begin(), operands.end(),
                                     [&](const Bytes& other) { return overlap(bytes, other); });
    if (!is_read) std::memset(result.mutable_data_ptr(), 0xFF, bytes.end - bytes.begin);
  }
}

}  // namespace torch_ort::run
