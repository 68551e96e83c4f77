// Runs the steps of a binding. No allocation by the engine, no schema lookup and no Python per
// step.
#include "base/error.h"
#include "base/failpoint.h"
#include "ops/kernel_checks.h"
#include "run/call_watch.h"
#include "run/context.h"
#include "run/control_flow.h"
#include "run/counters.h"
#include "run/spoil.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

namespace torch_ort::run {

namespace {

using torch::jit::Stack;

// Counted in a run, added to the global counters once at its end.
struct StepCounts {
  int64_t out = 0, functional = 0, view = 0, python = 0, region = 0;

  ~StepCounts() {
    counters().steps_run.fetch_add(out + functional + view + python + region,
                                   std::memory_order_relaxed);
    counters().steps_out.fetch_add(out, std::memory_order_relaxed);
    counters().steps_functional.fetch_add(functional, std::memory_order_relaxed);
    counters().steps_view.fetch_add(view, std::memory_order_relaxed);
    counters().steps_python.fetch_add(python, std::memory_order_relaxed);
    counters().steps_region.fetch_add(region, std::memory_order_relaxed);
  }
};

c10::IValue tensor_list(const Context& context, const ArgSource& source) {
  if (source.optional_elements) {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(source.slots.size());
    for (int slot : source.slots) {
      list.push_back(slot < 0 ? std::nullopt : std::optional<at::Tensor>(context.slots[slot]));
    }
    return list;
  }
  c10::List<at::Tensor> list;
  list.reserve(source.slots.size());
  for (int slot : source.slots) list.push_back(slot < 0 ? at::Tensor() : context.slots[slot]);
  return list;
}

void push_arg(const Context& context, const BoundArg& arg, Stack& stack) {
  const auto lookup = [&context](const std::string& name) { return context.symbol(name); };
  switch (arg.kind) {
    case BoundArg::Kind::kConstant: stack.emplace_back(arg.constant); return;
    case BoundArg::Kind::kSlot: stack.emplace_back(context.slots[arg.slot]); return;
    case BoundArg::Kind::kTensorList: stack.emplace_back(tensor_list(context, *arg.source)); return;
    case BoundArg::Kind::kLateDim: {
      const int64_t value = eval_dims(arg.source->dims, lookup)[0];
      stack.emplace_back(arg.source->as_tensor ? c10::IValue(wrapped_number(value))
                                               : c10::IValue(value));
      return;
    }
    case BoundArg::Kind::kLateDimList:
      stack.emplace_back(eval_dims(arg.source->dims, lookup));
      return;
  }
}

// The sizes of a result bind the symbols that stand for them.
void bind_late_symbols(Context& context, int slot) {
  const ir::Value* value = context.binding->session->slot_value(slot);
  if (!value->type.shape) return;
  const at::Tensor& tensor = context.slots[slot];
  const size_t dims = std::min<size_t>(value->type.shape->size(), tensor.dim());
  for (size_t i = 0; i < dims; ++i) {
    const ir::Dim& dim = (*value->type.shape)[i];
    if (!dim.is_symbol() || context.symbol(dim.name())) continue;
    context.late_symbols.emplace_back(dim.name(), tensor.size(static_cast<int64_t>(i)));
  }
}

void store(Context& context, int slot, at::Tensor tensor) {
  if (slot < 0) return;
  if (is_computed_by_reader(tensor)) [[unlikely]]
    tensor = computed(tensor);
  context.slots[slot] = std::move(tensor);
  if (context.binding->session->is_late_slot(slot)) bind_late_symbols(context, slot);
}

// Results of a functional call or a view go into their slots.
void store_results(Context& context, const Step& step, Stack& stack) {
  if (!step.binds_symbol.empty()) {
    const c10::IValue& value = stack.at(0);
    const c10::Scalar number = value.toScalar();
    ORT_CHECK(number.isIntegral(true), "run: ", step.name, ": got a number that is no integer");
    context.late_symbols.emplace_back(step.binds_symbol, number.toLong());
    return;
  }
  size_t next = 0;  // result, lists flattened
  const auto take = [&](at::Tensor tensor) {
    if (next < step.outputs.size()) store(context, step.outputs[next++], std::move(tensor));
  };
  for (c10::IValue& result : stack) {
    if (result.isTensor()) {
      take(std::move(result).toTensor());
    } else if (result.isTensorList()) {
      for (const c10::IValue& element : result.toListRef()) take(element.toTensor());
    } else {
      ++next;  // None, or a number
    }
  }
  if (step.form != Form::kMutation) return;
  for (size_t i = step.num_returns; i < step.outputs.size(); ++i) {
    store(context, step.outputs[i], context.slots[step.mutates.at(i - step.num_returns)]);
  }
}

void call_op(Context& context, const Step& step, const std::vector<BoundArg>& args) {
  Stack& stack = context.stack;
  stack.clear();
  for (const BoundArg& arg : args) push_arg(context, arg, stack);
  if (context.binding->session->is_from_file()) ops::check_kernel_arguments(*step.op, stack);
  step.op->callBoxed(&stack);
}

// What a kernel resizes, or points elsewhere, is not where the plan says, and may hold anything.
void check_written(const Context& context, const BoundStep& bound, size_t result,
                   const void* given) {
  const Step& step = *bound.step;
  const at::Tensor& tensor = context.slots[step.outputs[result]];
  const TensorSpec& spec = context.binding->specs[step.outputs[result]];
  const bool is_there = tensor.storage().data() == given;
  // Memory that is taken over keeps the strides that its kernel gave it.
  const bool is_laid_out =
      tensor.sizes() == c10::IntArrayRef(spec.sizes) &&
      (bound.takes_over >= 0 || same_strides(spec.sizes, tensor.strides(), spec.strides));
  if (is_there && is_laid_out) [[likely]]
    return;
  const std::string words =
      concat("run: ", step.op_name(), " (", step.name,
             step.origin.empty() ? "" : concat(", ", step.origin), "): result ", result, ": got ",
             tensor.sizes(), " with strides ", tensor.strides(), is_there ? "" : " in other memory",
             ", want ", c10::IntArrayRef(spec.sizes), " with strides ",
             c10::IntArrayRef(spec.strides), " in the memory that was given");
  // Of other sizes is what another type is promised for, by a file or by a rule of the recorder.
  const bool is_misnamed = tensor.sizes() != c10::IntArrayRef(spec.sizes);
  if (is_misnamed || context.binding->session->is_from_file()) throw UserError(words);
  throw InternalError(words);
}

void run_out(Context& context, const BoundStep& bound) {
  const std::vector<int>& outputs = bound.step->outputs;
  c10::SmallVector<const void*, 4> given;
  for (int slot : outputs) given.push_back(context.slots[slot].storage().data());
  call_op(context, *bound.step, bound.args);
  for (size_t i = 0; i < given.size(); ++i) check_written(context, bound, i, given[i]);
}

// A kernel may give its result other strides, or another dtype, than its shape rule promised.
at::Tensor as_promised(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor) {
  check_sizes(value, spec, tensor);
  at::Tensor copy = at::empty_strided(spec.sizes, spec.strides, tensor.options().dtype(spec.dtype));
  return copy.copy_(tensor);
}

void run_region(const Context& context, const BoundStep& bound) {
  const Step& step = *bound.step;
  c10::SmallVector<const void*, 32> inputs;
  c10::SmallVector<void*, 8> outputs;
  c10::SmallVector<at::Tensor, 2> copies;
  for (const ArgSource& source : step.args) {
    const at::Tensor& tensor = context.slots[source.slots[0]];
    const TensorSpec& spec = context.binding->specs[source.slots[0]];
    if (has_layout(tensor, spec)) {
      inputs.push_back(tensor.const_data_ptr());
    } else {
      const ir::Value* value = context.binding->session->slot_value(source.slots[0]);
      copies.push_back(as_promised(*value, spec, tensor));
      inputs.push_back(copies.back().const_data_ptr());
    }
  }
  for (int slot : step.outputs) outputs.push_back(context.slots[slot].mutable_data_ptr());
  bound.kernel->run(inputs.data(), outputs.data());
}

// Results that are parts of what the caller gets.
void point_parts(Context& context, const BoundStep& bound) {
  for (const PartSpec& part : bound.parts) {
    const at::Tensor& object = context.views[part.place.slot];
    object.unsafeGetTensorImpl()->set_storage_keep_dtype(context.slots[part.whole].storage());
    object.unsafeGetTensorImpl()->set_storage_offset(part.place.offset);
    context.slots[part.place.slot] = object;
  }
}

void copy_rest(const Context& context, const BoundStep& bound) {
  const at::Tensor& whole = context.slots[bound.step->outputs[0]];
  for (const ViewSpec& part : bound.rest) {
    whole.as_strided(part.sizes, part.strides, part.offset).copy_(context.slots[part.slot]);
  }
}

// The kernel's results into the memory that the plan chose; where they came elsewhere they are
// copied, and the next call knows better.
void run_placed(Context& context, const BoundStep& bound) {
  const Step& step = *bound.step;
  const auto target = [&](size_t i) -> const at::Tensor& { return context.slots[step.outputs[i]]; };
  Placement placement;
  for (const plan::Workspace& space : bound.workspaces) {
    const bool in_context = space.area == plan::Area::kContext;
    char* const area = in_context ? context.context_data : context.scratch_data;
    if (area != nullptr) placement.add_workspace(area + space.offset, space.bytes);
  }
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    if (step.outputs[i] < 0) continue;
    placement.expect((*bound.numbers)[i].load(std::memory_order_relaxed),
                     target(i).mutable_data_ptr(), context.binding->specs[step.outputs[i]].bytes);
  }
  call_op(context, step, bound.args);
  c10::SmallVector<std::pair<size_t, at::Tensor>, 3> elsewhere;
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    if (step.outputs[i] < 0) continue;
    const at::Tensor& made = context.stack.at(i).toTensor();
    const TensorSpec& spec = context.binding->specs[step.outputs[i]];
    ORT_CHECK(made.defined(), "run: ", step.name, ": result ", i, " is missing");
    check_sizes(*context.binding->session->slot_value(step.outputs[i]), spec, made);
    const bool is_there = made.const_data_ptr() == target(i).const_data_ptr();
    if (made.numel() == 0 || (is_there && has_layout(made, spec))) continue;
    std::atomic<int>& number = (*bound.numbers)[i];
    if (number.load(std::memory_order_relaxed) != AllocationNumbers::kNever) {
      number.store(
          is_there ? AllocationNumbers::kNever : placement.number_of(made.storage().data()),
          std::memory_order_relaxed);
    }
    // In its own place otherwise laid out, or in the place of another result.
    elsewhere.emplace_back(i, placement.has_placed(made.storage().data()) ? made.clone() : made);
  }
  for (const auto& [i, made] : elsewhere) {
    target(i).copy_(made);
    counters().results_copied.fetch_add(1, std::memory_order_relaxed);
  }
  elsewhere.clear();
  context.stack.clear();
  ORT_CHECK(placement.is_over(), "run: ", step.name, ": the kernel keeps memory of the engine");
}

// A reshape that the plan takes for a copy, and which is none by its nature, would look at memory
// that the next step may write into.
void own_result(Context& context, const Step& step) {
  const at::Tensor result = context.stack.back().toTensor();
  const int base = step.reads().front(), slot = step.outputs[0];
  if (!context.binding->specs[base].known || !result.is_alias_of(context.slots[base])) return;
  const TensorSpec& spec = context.binding->specs[slot];
  context.stack.back() =
      spec.known ? as_promised(*context.binding->session->slot_value(slot), spec, result)
                 : result.clone(at::MemoryFormat::Contiguous);
}

// What the plan takes for memory of its own, and is not: the next step may write into it.
void own_results(Context& context, const Step& step) {
  const std::vector<int> given = step.reads();
  const auto owned = [&](const at::Tensor& result) {
    const bool is_given = std::any_of(given.begin(), given.end(), [&](int slot) {
      const at::Tensor& argument = context.slots[slot];
      return argument.defined() && result.defined() && result.is_alias_of(argument);
    });
    return is_given ? result.clone() : result;
  };
  for (c10::IValue& result : context.stack) {
    if (result.isTensor()) {
      result = owned(result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& element : result.toTensorVector()) list.push_back(owned(element));
      result = list;
    }
  }
}

void check_results(const Context& context, const Step& step, decltype(check_sizes)& check) {
  for (int slot : step.outputs) {
    if (slot < 0 || !context.binding->specs[slot].known) continue;
    check(*context.binding->session->slot_value(slot), context.binding->specs[slot],
          context.slots[slot]);
  }
}

// What capture has learnt of a Function, every call of it must keep to. Strides are put right.
void check_python_results(Context& context, const Step& step) {
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    const int slot = step.outputs[i];
    if (slot < 0 || !context.binding->specs[slot].known) continue;
    const TensorSpec& spec = context.binding->specs[slot];
    at::Tensor& tensor = context.slots[slot];
    check_learnt(concat(step.name, step.origin.empty() ? "" : concat(" (", step.origin, ")"),
                        ": result ", i),
                 spec, tensor);
    if (!has_layout(tensor, spec)) {
      tensor = as_promised(*context.binding->session->slot_value(slot), spec, tensor);
    }
  }
}

void run_control_flow(Context& context, const BoundStep& bound) {
  const Step& step = *bound.step;
  Session::Tensors inputs;
  for (const BoundArg& arg : bound.args) {
    inputs.push_back(arg.kind == BoundArg::Kind::kSlot ? context.slots[arg.slot] : at::Tensor());
  }
  Session::Tensors results = step.control_flow->run(
      inputs, [&context](const std::string& name) { return context.symbol(name); });
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    const int slot = step.outputs[i];
    if (slot < 0) continue;
    const TensorSpec& spec = context.binding->specs[slot];
    // Two ways to a value may give it two layouts.
    if (spec.known && !has_layout(results[i], spec)) {
      results[i] = as_promised(*context.binding->session->slot_value(slot), spec, results[i]);
    }
    store(context, slot, std::move(results[i]));
  }
}

void run_step(Context& context, const BoundStep& bound, StepCounts& counts) {
  const Step& step = *bound.step;
  RECORD_FUNCTION(step.name, c10::ArrayRef<const c10::IValue>{});
  for (int slot : bound.allocate) {
    context.slots[slot] = make_tensor(context.binding->specs[slot]);
    counters().outputs_allocated.fetch_add(1, std::memory_order_relaxed);
  }
  point_parts(context, bound);
  if (bound.takes_over >= 0) context.slots[step.outputs[0]] = context.slots[bound.takes_over];
  const Session& session = *context.binding->session;
  // The parts of a concatenation are there already, in the memory of the whole.
  if (session.spoils() && step.writes_given_memory() && bound.form != Form::kParts) {
    spoil_results(context, step);
  }
  switch (bound.form) {
    case Form::kOut:
      run_out(context, bound);
      ++counts.out;
      break;
    case Form::kMutation:
    case Form::kFunctional:
    case Form::kReshape:
      call_op(context, step, bound.args);
      if (step.form == Form::kReshape) own_result(context, step);
      if (step.may_give_argument) own_results(context, step);
      store_results(context, step, context.stack);
      ++counts.functional;
      break;
    case Form::kView:
      if (move_views(context, bound)) break;
      call_op(context, step, bound.args);
      store_results(context, step, context.stack);
      ++counts.view;
      break;
    case Form::kPlaced:
      run_placed(context, bound);
      ++counts.out;
      break;
    case Form::kRegion:
      run_region(context, bound);
      ++counts.region;
      break;
    case Form::kControlFlow:
      run_control_flow(context, bound);
      ++counts.functional;
      break;
    case Form::kParts:
      copy_rest(context, bound);
      ++counts.out;
      break;
    case Form::kKeep: break;
    case Form::kPython: {
      // Python code finds the dispatch state in which eager PyTorch would call it, but for
      // gradients.
      const c10::impl::ForceDispatchKeyGuard plain(
          c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
      call_op(context, step, bound.args);
      store_results(context, step, context.stack);
      ++counts.python;
      break;
    }
    case Form::kPythonOp:
      call_op(context, step, bound.args);
      store_results(context, step, context.stack);
      check_python_results(context, step);
      ++counts.python;
      break;
  }
  if (session.verifies()) check_results(context, step, check_sizes);
  for (int slot : bound.release) context.slots[slot].reset();
}

}  // namespace

bool move_views(Context& context, const BoundStep& bound) {
  if (bound.views.empty()) return false;
  const at::Tensor& viewed = context.slots[bound.viewed];
  const TensorSpec& spec = context.binding->specs[bound.viewed];
  if (viewed.strides() != c10::IntArrayRef(spec.strides) ||
      viewed.sizes() != c10::IntArrayRef(spec.sizes)) {
    return false;
  }
  for (const ViewSpec& view : bound.views) {
    const at::Tensor& object = context.views[view.slot];
    object.unsafeGetTensorImpl()->set_storage_keep_dtype(viewed.storage());
    object.unsafeGetTensorImpl()->set_storage_offset(viewed.storage_offset() + view.offset);
    context.slots[view.slot] = object;
  }
  return true;
}

void make_static_view(Context& context, const Step& step) {
  const auto lookup = [&context](const std::string& name) { return context.symbol(name); };
  Stack& stack = context.stack;
  stack.clear();
  for (const ArgSource& source : step.args) {
    switch (source.kind) {
      case ArgSource::Kind::kConstant: stack.emplace_back(source.constant); break;
      case ArgSource::Kind::kDim: stack.emplace_back(eval_dims(source.dims, lookup)[0]); break;
      case ArgSource::Kind::kDimList: stack.emplace_back(eval_dims(source.dims, lookup)); break;
      case ArgSource::Kind::kSlotList: stack.emplace_back(tensor_list(context, source)); break;
      case ArgSource::Kind::kSlot:
      case ArgSource::Kind::kOutput: stack.emplace_back(context.slots[source.slots[0]]); break;
    }
  }
  step.op->callBoxed(&stack);
  store_results(context, step, stack);
  stack.clear();
  // The plan took its word for what the next view looks at: a reshape that is none would copy
  // memory that is not there yet.
  check_results(context, step, check_layout);
}

void run_steps(Context& context, const std::vector<BoundStep>& steps) {
  CallWatch::begin();
  const bool is_tested = failpoint.load(std::memory_order_relaxed) != nullptr;
  StepCounts counts;
  for (const BoundStep& bound : steps) {
    try {
      if (is_tested && !bound.is_done) [[unlikely]]
        may_fail(name(bound.form));
      if (!bound.is_done) run_step(context, bound, counts);
      for (const plan::Discard& discard : bound.discards) {
        release_pages(context.context_data + discard.offset, discard.bytes);
      }
    } catch (c10::Error& error) {
      const Step& step = *bound.step;
      error.add_context(concat("in ", step.name,
                               step.origin.empty() ? "" : concat(", from ", step.origin),
                               ", run by torch_ort"));
      context.failed = true;
      context.stack.clear();
      throw;
    } catch (...) {
      context.failed = true;
      context.stack.clear();
      throw;
    }
  }
  context.stack.clear();
}

std::optional<int64_t> Context::symbol(const std::string& name) const {
  for (const auto& [symbol, value] : binding->symbols) {
    if (symbol == name) return value;
  }
  for (const auto& [symbol, value] : late_symbols) {
    if (symbol == name) return value;
  }
  return std::nullopt;
}

// The objects are the engine's, what they look at is not.
void Context::let_go_of_views() {
  for (const ViewSpec* view : binding->moving_views) {
    views[view->slot].unsafeGetTensorImpl()->set_storage_keep_dtype(empty_storage);
  }
}

void Context::clear() {
  let_go_of_views();
  for (int slot : binding->transient) slots[slot].reset();
  late_symbols.clear();
  stack.clear();
  attach_context_memory(nullptr);
  attach_scratch(nullptr);
  if (context_memory) context_memory->end_context();
  context_memory.reset();
  spent = false;
}

}  // namespace torch_ort::run
