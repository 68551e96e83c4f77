// The forms of a step. To add one, write a file in this folder with its Step and its BoundStep, and
// add a line to each of the two lists below.
#pragma once

#include "ops/call.h"
#include "run/compiled_graph.h"
#include "run/step.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>
#include <optional>
#include <unordered_set>

namespace torch_ort::run {

// A call, as a form sees it.
struct CallSite {
  const ops::Call& call;
  std::optional<c10::OperatorHandle> op;  // the operator; nothing if it is not registered
  const Slots& slots;
  const Constants& constants;
  const SessionOptions& options;
  bool on_cpu;                 // whether the program runs on the CPU
  bool is_unbacked;            // a result cannot be planned; see SlotFacts::unbacked
  const CompiledGraph& graph;  // with the steps of the calls before this one
  // What of the forward half the caller gets, or waits of the backward half wait for, and what that
  // is a view of.
  const std::unordered_set<const ir::Value*>& leaving;

  int slot(const ir::Value* value) const;
  std::vector<int> output_slots() const;  // -1: nobody reads the result
  // Whether the dtype and shape of all results that are read are known.
  bool has_known_results() const;
};

// Each returns nullptr if the call is not of its form.
std::unique_ptr<Step> make_control_flow(const CallSite& site);
std::unique_ptr<Step> make_keep(const CallSite& site);
std::unique_ptr<Step> make_region(const CallSite& site);
std::unique_ptr<Step> make_python(const CallSite& site);
std::unique_ptr<Step> make_python_op(const CallSite& site);
std::unique_ptr<Step> make_collective(const CallSite& site);
std::unique_ptr<Step> make_reshape(const CallSite& site);
std::unique_ptr<Step> make_mutation(const CallSite& site);
std::unique_ptr<Step> make_view(const CallSite& site);
std::unique_ptr<Step> make_concat(const CallSite& site);
std::unique_ptr<Step> make_slice_scatter(const CallSite& site);
std::unique_ptr<Step> make_product(const CallSite& site);
std::unique_ptr<Step> make_out(const CallSite& site);
std::unique_ptr<Step> make_placed(const CallSite& site);
std::unique_ptr<Step> make_functional(const CallSite& site);

// The order in which the forms are tried.
inline constexpr std::array kForms = {
    make_control_flow,  // If or Loop, whose bodies make the results
    // Does nothing; it keeps the values that it reads alive until then.
    make_keep,
    make_region,      // a fused region: a kernel of region/codegen.h
    make_python,      // a Python callable, for operators without a schema
    make_python_op,   // a torch.autograd.Function (python_op.h), whose results are checked
    make_collective,  // communication between ranks, or a wait for it
    make_reshape,     // a view if the strides allow it, else a copy
    make_mutation,    // changes an argument; its results, if any, are that argument
    make_view,        // a view: the result shares the memory of its first tensor argument
    // A concatenation by `out=`; operands may be written in place (parts.h).
    make_concat,
    make_slice_scatter,  // a tensor of which a part is replaced, in place where possible
    make_product,        // a product of matrices, by a kernel of region/codegen.h or by `out=`
    make_out,            // `out=` kernel, or an in-place one on fresh memory
    make_placed,         // the kernel allocates the result and gets planned memory (placement.h)
    make_functional,     // the kernel allocates the result; takes every remaining call
};

// Makes the step of a call. Throws Unsupported if the operator is not registered, and InternalError
// if the arguments do not fit its schema.
std::unique_ptr<Step> make_step(const CallSite& site);

// The name of a call that keeps values which a backward half may read.
inline constexpr const char* kKeepCall = "torch_ort::keep";

}  // namespace torch_ort::run
