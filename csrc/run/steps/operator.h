// Steps that call an operator of the dispatcher, and the arguments of such calls.
#pragma once

#include "run/steps/forms.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::run {

// Where one argument comes from.
struct ArgSource {
  enum class Kind : uint8_t { kConstant, kSlot, kSlotList, kDim, kDimList, kOutput } kind;
  c10::IValue constant;    // kConstant
  std::vector<int> slots;  // kSlot: one; kSlotList: several, -1 for None; kOutput: which result
  bool optional_elements = false;  // kSlotList: Tensor?[]
  ir::Shape dims;                  // kDim: one; kDimList: several
  bool as_tensor = false;          // kDim: the operator takes the number as a tensor

  static ArgSource of_constant(c10::IValue value);
  static ArgSource of_output(int index);
};

// An argument with all sizes filled in.
struct BoundArg {
  enum class Kind : uint8_t { kConstant, kSlot, kTensorList, kUnbackedDim, kUnbackedDimList } kind;
  int slot = -1;
  c10::IValue constant;
  const ArgSource* source = nullptr;  // for lists, and for dims with unbacked symbols

  bool is_unbacked() const { return kind == Kind::kUnbackedDim || kind == Kind::kUnbackedDimList; }
};

struct OperatorStep : Step {
  c10::OperatorHandle op;  // the operator to call; the out= overload if results have given memory
  std::vector<ArgSource> args;  // in the order of the schema of `op`

  // Matches the arguments and results of a call to the schema of `op`, which need not be the
  // operator that the call names.
  OperatorStep(const CallSite& site, const c10::OperatorHandle& op, const ops::ArgList& args);

  std::string op_name() const override;
  std::vector<int> reads() const override;
  std::vector<ir::Dim> dims() const override;
  std::string why_host_is_needed() const override;

  std::vector<BoundArg> bind_args(const Binder& binder) const;
  // Calls the operator and leaves its results on the context's stack.
  void call(Context& context, const std::vector<BoundArg>& args) const;
  // Moves the results from the stack to their slots.
  void store_results(Context& context) const;
};

// A call with bound arguments. The form adds what happens before and after it.
template <typename Form>
struct BoundCall : BoundStep {
  const Form& of;
  std::vector<BoundArg> args;

  BoundCall(const Form& called, Binder& binder)
      : BoundStep(called), of(called), args(called.bind_args(binder)) {}
};

// The slots of the operands that have the type of the only result.
std::vector<int> operands_like_result(const CallSite& site);

}  // namespace torch_ort::run
