// Finds how a call can write its result into given memory; internal to run/.
#pragma once

#include "ops/out_form.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

namespace torch_ort::run {

std::optional<c10::OperatorHandle> find_op(const std::string& op, const std::string& overload);

// For each `out=` overload, the words that say what has been proved of it.
using Proofs = std::unordered_map<std::string, std::set<std::string>>;

// What has been proved for a device and the minor version of torch in `version`; nothing at all for
// a version that has no column.
Proofs proved_out_forms(const std::string& device, const std::string& version);

// An `out=` overload of a functional one, and the layouts of results for which it is proved to be
// correct, besides row-major memory of their own (proved_out_forms.h).
struct OutForm {
  c10::OperatorHandle op;
  bool any_strides;    // any order of dims
  bool over_operands;  // over an operand of the same layout
  bool over_rows;      // over an operand even if the kernel gathers along the last dim
  bool with_gaps;      // with gaps between elements
};

// Returns nothing if no such overload is proved for this version of torch and this device.
std::optional<OutForm> find_out_form(const c10::OperatorHandle& functional, bool on_cpu);

// The form in the row of the call's operator; nullptr if there is none.
const ops::OverwriteForm* find_overwrite_form(const ops::Call& call);

// Replaces calls whose functional kernel allocates by calls that have an `out=` overload and
// compute the same bits (embedding by index_select, dropout by bernoulli and products, ...), as the
// rows of their operators say. Calls with an unbacked result are not replaced.
void prefer_out_forms(ops::CallList& calls, bool on_cpu, size_t& yield_position,
                      const std::function<bool(const ir::Value*)>& is_unbacked);

}  // namespace torch_ort::run
