// The forms that a step can have. To add one: a file in this folder with its Step and its
// BoundStep, and a line in each of the two lists below.
#pragma once

#include "ops/call.h"
#include "run/compiled_graph.h"
#include "run/step.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>
#include <optional>

namespace torch_ort::run {

// What a form sees of a call.
struct CallSite {
  const ops::Call& call;
  std::optional<c10::OperatorHandle> op;  // that the call names; nothing if none is registered
  const Slots& slots;
  const Constants& constants;
  const SessionOptions& options;
  bool on_cpu;       // the program runs there
  bool is_unbacked;  // some result has a size that is known only when the step has run

  int slot(const ir::Value* value) const;
  std::vector<int> output_slots() const;  // -1: nobody reads it
  bool has_known_results() const;         // dtype and shape of all that somebody reads
};

// Each gives nullptr where the call is not of its form.
std::unique_ptr<Step> make_control_flow(const CallSite& site);
std::unique_ptr<Step> make_keep(const CallSite& site);
std::unique_ptr<Step> make_region(const CallSite& site);
std::unique_ptr<Step> make_python(const CallSite& site);
std::unique_ptr<Step> make_python_op(const CallSite& site);
std::unique_ptr<Step> make_reshape(const CallSite& site);
std::unique_ptr<Step> make_mutation(const CallSite& site);
std::unique_ptr<Step> make_view(const CallSite& site);
std::unique_ptr<Step> make_concat(const CallSite& site);
std::unique_ptr<Step> make_product(const CallSite& site);
std::unique_ptr<Step> make_out(const CallSite& site);
std::unique_ptr<Step> make_placed(const CallSite& site);
std::unique_ptr<Step> make_functional(const CallSite& site);

// In the order in which they are asked.
inline constexpr std::array kForms = {
    make_control_flow,  // If or Loop, whose bodies make the results
    make_keep,          // does nothing: what it reads is there until it has run
    make_region,        // a fused region: a kernel of region/codegen.h
    make_python,        // a Python callable, for operators without a schema
    make_python_op,     // a torch.autograd.Function (python_op.h), whose results are checked
    make_reshape,       // a view where the strides allow it, else a copy
    make_mutation,      // changes an argument; its results, if any, are that argument
    make_view,          // metadata only: the result shares the memory of its first tensor argument
    make_concat,        // `out=` of a concatenation, whose parts may be made in it (parts.h)
    make_product,       // a product of matrices, by a kernel of region/codegen.h or by `out=`
    make_out,           // `out=` kernel, or an in-place one on fresh memory
    make_placed,        // the kernel makes the result, in memory given to it (placement.h)
    make_functional,    // the kernel makes the result; takes every call that is left
};

// Raises Unsupported if the operator is not registered, InternalError if the arguments do not fit
// its schema.
std::unique_ptr<Step> make_step(const CallSite& site);

// Lowering's name for a call that keeps what a backward half might have read.
inline constexpr const char* kKeepCall = "torch_ort::keep";

}  // namespace torch_ort::run
