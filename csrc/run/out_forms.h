// Which calls can write their results into memory that they are given; internal to run/.
#pragma once

#include "ops/out_form.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>

namespace torch_ort::run {

std::optional<c10::OperatorHandle> find_op(const std::string& op, const std::string& overload);

// An overload that takes the arguments of a functional one and then the results, and where these
// may lie besides row-major in memory of their own, as far as tests have proved
// (proved_out_forms.h).
struct OutForm {
  c10::OperatorHandle op;
  bool any_strides;    // in any order of dims
  bool over_operands;  // where an operand of the same layout does
  bool over_rows;      // so too, if the kernel gathers along the last dim
  bool with_gaps;      // with gaps between the elements
};

// Nothing where no such overload is proved for this torch and device.
std::optional<OutForm> find_out_form(const c10::OperatorHandle& functional, bool on_cpu);

// By the row of its operator; nullptr if there is none.
const ops::OverwriteForm* find_overwrite_form(const ops::Call& call);

// Replaces calls whose functional kernel allocates by equal calls that have a real `out=` form
// (embedding by index_select, dropout by bernoulli and products, ...), as the rows of their
// operators say. Bits of the results stay. Calls with an unbacked result stay as they are.
void prefer_out_forms(ops::CallList& calls, bool on_cpu, size_t& yield_position,
                      const std::function<bool(const ir::Value*)>& is_unbacked);

}  // namespace torch_ort::run
