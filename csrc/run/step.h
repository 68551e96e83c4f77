// Calls bound to the dispatcher: which operator, which arguments from where, which results to
// where.
#pragma once

#include "ops/call.h"
#include "region/schedule.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

// Slots number the tensors of a session.
using Slots = std::unordered_map<const ir::Value*, int>;

// How a step gets its result.
enum class Form : uint8_t {
  kOut,         // `out=` kernel, or an in-place one on fresh memory: writes into memory given to it
  kFunctional,  // the kernel makes the result
  kView,        // metadata only: the result shares the memory of its first tensor argument
  kReshape,     // a view where the strides allow, else a copy
  kMutation,    // changes an argument; its results, if any, are that argument
  kPython,      // a Python callable, for operators without a schema
  kPythonOp,    // a torch.autograd.Function (python_op.h), whose results are checked
  kRegion,      // a fused region: a kernel of region/codegen.h, writes into memory given to it
  kPlaced,      // the kernel makes the result, in memory given to it (placement.h)
  kControlFlow,  // If or Loop, whose bodies make the results (control_flow.h)
  kParts,        // a concatenation whose parts are made in it; what comes from elsewhere is copied
  kKeep,         // does nothing: what it reads is there until it has run
};

const char* name(Form form);  // "out", "control_flow"

// Where one argument comes from.
struct ArgSource {
  enum class Kind : uint8_t { kConstant, kSlot, kSlotList, kDim, kDimList, kOutput } kind;
  c10::IValue constant;    // kConstant
  std::vector<int> slots;  // kSlot: one; kSlotList: several, -1 for None; kOutput: which result
  bool optional_elements = false;  // kSlotList: Tensor?[]
  ir::Shape dims;                  // kDim: one; kDimList: several
  bool as_tensor = false;          // kDim: the operator takes a tensor, which stands for the number
};

// A 0-d tensor that stands for a Python number: it takes no part in type promotion.
at::Tensor wrapped_number(const c10::Scalar& number);

class ControlFlow;

struct Step {
  Form form = Form::kFunctional;
  std::optional<c10::OperatorHandle> op;  // what is called: the out= overload in form kOut
  std::vector<ArgSource> args;            // of `op`, in the order of its schema
  std::vector<int>
      outputs;  // slots of the tensors that the call gives, lists flattened; -1: not kept
  std::vector<int> mutates;  // slots that the call writes into
  size_t num_returns = 0;    // outputs after these are `mutates`, as they are afterwards
  bool effect = false;       // random, writes or raises: keeps its order
  // The operator is made of others: a result may be an argument, or look at one, though its schema
  // does not say so.
  bool may_give_argument = false;
  std::vector<int> in_place;         // input slots over which outputs[0] may be written
  bool writes_gaps = false;          // of form kOut: the kernel writes results that have gaps
  std::string binds_symbol;          // the result is no tensor but the value of this symbol
  const ir::Node* region = nullptr;  // of form kRegion, which has no `op`
  std::shared_ptr<const region::Schedule> schedule;  // of `region`, if that has a body
  std::shared_ptr<const ControlFlow> control_flow;   // of form kControlFlow, which has none either
  std::string name;                                  // of the node, for profilers and messages
  std::string origin;

  std::string op_name() const;
  bool writes_given_memory() const {
    return form == Form::kOut || form == Form::kRegion || form == Form::kPlaced;
  }

  // Whether it can do so wherever each element lies, and at no cost.
  bool writes_strided_memory() const;

  std::vector<int> reads() const;  // slots of tensor arguments, each once
};

// Finds operators, and the real `out=` form of a functional one.
class Resolver {
 public:
  Resolver(const Slots& slots, bool on_cpu) : slots_(slots), on_cpu_(on_cpu) {}

  // Raises Unsupported if no such operator is registered, InternalError if arguments do not fit its
  // schema.
  Step resolve(const ops::Call& call) const;
  // Slots alone: what the step runs, the session gives it.
  Step bind_control_flow(const ops::Call& call) const;
  // What the call reads stays until then, and nothing runs.
  Step bind_keep(const ops::Call& call) const;
  // The form whose kernel makes its results, whatever their sizes.
  Step resolve_functional(const ops::Call& call) const;

 private:
  Step bind(const c10::OperatorHandle& op, const ops::ArgList& args, const ops::Call& call) const;
  Step bind_region(const ops::Call& call) const;
  Step bind_slots(const ops::Call& call, Form form) const;
  ArgSource bind_arg(const c10::Argument& schema, const ops::Arg& arg) const;
  bool use_out_form(const ops::Call& call, Step& step) const;
  bool place_results(const ops::Call& call, Step& step) const;
  std::vector<int> operands_like_result(const ops::Call& call) const;
  int slot(const ir::Value* value) const;

  const Slots& slots_;
  bool on_cpu_;
};

}  // namespace torch_ort::run
