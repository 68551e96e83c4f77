// Which calls can write their results into memory that they are given; internal to run/.
#pragma once

#include "ops/call.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>

namespace torch_ort::run {

std::optional<c10::OperatorHandle> find_op(const std::string& op, const std::string& overload);

// The overload that takes the same arguments and then the results, if its kernel really writes
// into them.
std::optional<c10::OperatorHandle> find_out_overload(const c10::OperatorHandle& functional,
                                                     bool on_cpu);

// Out-first forms: an in-place operator that overwrites its first argument whole, whatever it held.
struct OverwriteForm {
  const char* functional;  // "aten::clone"
  const char* overload;
  const char* in_place;  // "aten::copy_"
  const char* in_place_overload;
  ops::ArgList (*args)(const ops::ArgList& functional_args);  // after the overwritten one
};

const OverwriteForm* find_overwrite_form(const ops::Call& call);  // nullptr: there is none

// Replaces calls whose functional kernel allocates by equal calls that have a real `out=` form
// (embedding by index_select, dropout by bernoulli and products, ...). Bits of the results stay.
// Calls with a late result stay as they are.
void prefer_out_forms(ops::CallList& calls, bool on_cpu, size_t& yield_position,
                      const std::function<bool(const ir::Value*)>& is_late);

}  // namespace torch_ort::run
