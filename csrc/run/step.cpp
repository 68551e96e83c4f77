#include "run/step.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/op.h"
#include "run/control_flow.h"
#include "run/dtype.h"
#include "run/out_forms.h"
#include "run/placement.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

using c10::FunctionSchema;
using c10::IValue;
using c10::TypeKind;

TypeKind element_kind(const c10::TypePtr& type) {
  if (type->kind() == TypeKind::OptionalType) {
    return element_kind(type->castRaw<c10::OptionalType>()->getElementType());
  }
  return type->kind();
}

c10::TypePtr unwrap_optional(c10::TypePtr type) {
  while (type->kind() == TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  return type;
}

c10::MemoryFormat memory_format_from_name(const std::string& name) {
  if (name == "contiguous_format") return c10::MemoryFormat::Contiguous;
  if (name == "preserve_format") return c10::MemoryFormat::Preserve;
  if (name == "channels_last") return c10::MemoryFormat::ChannelsLast;
  if (name == "channels_last_3d") return c10::MemoryFormat::ChannelsLast3d;
  throw InternalError(concat("memory format: got '", name, "'"));
}

c10::Layout layout_from_name(const std::string& name) {
  if (name == "strided") return c10::Layout::Strided;
  throw Unsupported(concat("layout: got '", name, "', want strided"));
}

// A string argument, by what the schema says it stands for.
IValue string_value(const c10::Argument& schema, const std::string& text) {
  const c10::TypePtr real = unwrap_optional(schema.real_type());
  switch (real->kind()) {
    case TypeKind::ScalarTypeType:
      return static_cast<int64_t>(scalar_type(ir::dtype_from_name(text)));
    case TypeKind::LayoutType: return static_cast<int64_t>(layout_from_name(text));
    case TypeKind::MemoryFormatType: return static_cast<int64_t>(memory_format_from_name(text));
    case TypeKind::DeviceObjType: return c10::Device(text);
    default: return text;
  }
}

bool takes_double(const c10::Argument& schema) {
  return element_kind(schema.type()) == TypeKind::FloatType;
}

IValue number_list(const c10::Argument& schema, const ops::ArgList& items) {
  const c10::TypePtr list = unwrap_optional(schema.type());
  const c10::TypePtr element = list->castRaw<c10::ListType>()->getElementType();
  if (element->kind() == TypeKind::FloatType) {
    std::vector<double> values;
    for (const ops::Arg& item : items) {
      const ir::Dim* dim = std::get_if<ir::Dim>(&item.value);
      values.push_back(dim != nullptr ? static_cast<double>(dim->constant())
                                      : std::get<double>(item.value));
    }
    return values;
  }
  if (element->kind() == TypeKind::BoolType) {
    c10::List<bool> values;
    for (const ops::Arg& item : items) values.push_back(std::get<bool>(item.value));
    return values;
  }
  c10::impl::GenericList values(element);
  for (const ops::Arg& item : items) {
    if (const auto* flag = std::get_if<bool>(&item.value))
      values.push_back(IValue(*flag));
    else if (const auto* real = std::get_if<double>(&item.value))
      values.push_back(IValue(*real));
    else if (const auto* pair = std::get_if<std::complex<double>>(&item.value))
      values.push_back(IValue(c10::complex<double>(*pair)));
    else if (const auto* dim = std::get_if<ir::Dim>(&item.value))
      values.push_back(IValue(dim->constant()));
    else if (const auto* text = std::get_if<std::string>(&item.value))
      values.push_back(IValue(*text));
    else
      throw InternalError("argument list: an element is neither number nor text");
  }
  return values;
}

ArgSource constant(IValue value) {
  ArgSource source;
  source.kind = ArgSource::Kind::kConstant;
  source.constant = std::move(value);
  return source;
}

// Whether the kernel gathers along the last dim (row_argument in ops/op.h).
bool works_along_rows(const ops::Call& call) {
  const int argument = ops::registry().operator_row(call.op).row_argument;
  if (argument < 0 || !call.outputs[0]->type.shape) return false;
  const auto* dim = std::get_if<ir::Dim>(&call.args.at(argument).value);
  const auto rank = static_cast<int64_t>(call.outputs[0]->type.shape->size());
  return dim != nullptr && rank > 0 && (*dim == ir::Dim(-1) || *dim == ir::Dim(rank - 1));
}

bool are_row_major(const std::vector<ir::Value*>& values) {
  return std::none_of(values.begin(), values.end(), [](const ir::Value* value) {
    return value != nullptr && value->type.strides.has_value();
  });
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

}  // namespace

const char* name(Form form) {
  static constexpr const char* kNames[] = {"out",      "functional",   "view",      "reshape",
                                           "mutation", "python",       "python_op", "region",
                                           "placed",   "control_flow", "parts",     "keep"};
  return kNames[static_cast<size_t>(form)];
}

at::Tensor wrapped_number(const c10::Scalar& number) {
  at::Tensor tensor = at::scalar_tensor(number, at::TensorOptions().dtype(number.type()));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

bool Step::writes_strided_memory() const {
  if (form == Form::kRegion) return region->op.name != "EmbeddingGrad";
  return form == Form::kOut && writes_gaps;
}

std::vector<int> Step::reads() const {
  std::vector<int> slots;
  for (const ArgSource& arg : args) {
    if (arg.kind != ArgSource::Kind::kSlot && arg.kind != ArgSource::Kind::kSlotList) continue;
    for (int slot : arg.slots) {
      if (slot >= 0 && std::find(slots.begin(), slots.end(), slot) == slots.end()) {
        slots.push_back(slot);
      }
    }
  }
  return slots;
}

int Resolver::slot(const ir::Value* value) const {
  auto found = slots_.find(value);
  ORT_CHECK(found != slots_.end(), "run: value '", value->name, "' has no slot");
  return found->second;
}

ArgSource Resolver::bind_arg(const c10::Argument& schema, const ops::Arg& arg) const {
  ArgSource source;
  if (arg.is_none()) return constant(IValue());
  if (auto* value = std::get_if<ir::Value*>(&arg.value)) {
    source.kind = ArgSource::Kind::kSlot;
    source.slots = {slot(*value)};
    return source;
  }
  // A number where the operator takes a tensor.
  const bool wraps = element_kind(schema.type()) == TypeKind::TensorType;
  if (auto* flag = std::get_if<bool>(&arg.value)) {
    return wraps ? constant(wrapped_number(*flag)) : constant(*flag);
  }
  if (auto* real = std::get_if<double>(&arg.value)) {
    return wraps ? constant(wrapped_number(*real)) : constant(*real);
  }
  if (auto* pair = std::get_if<std::complex<double>>(&arg.value)) {
    const c10::complex<double> number(*pair);
    return wraps ? constant(wrapped_number(number)) : constant(number);
  }
  if (auto* text = std::get_if<std::string>(&arg.value))
    return constant(string_value(schema, *text));
  if (auto* dim = std::get_if<ir::Dim>(&arg.value)) {
    const TypeKind wanted = element_kind(schema.type());
    if (dim->is_constant()) {
      if (wraps) return constant(wrapped_number(dim->constant()));
      if (wanted == TypeKind::ListType) return constant(c10::List<int64_t>({dim->constant()}));
      if (takes_double(schema)) return constant(static_cast<double>(dim->constant()));
      if (wanted == TypeKind::BoolType) return constant(dim->constant() != 0);
      return constant(dim->constant());
    }
    source.kind = wanted == TypeKind::ListType ? ArgSource::Kind::kDimList : ArgSource::Kind::kDim;
    source.dims = {*dim};
    source.as_tensor = wraps;
    return source;
  }

  const auto& items = std::get<ops::ArgList>(arg.value);
  const c10::TypePtr list = unwrap_optional(schema.type());
  ORT_CHECK(list->kind() == TypeKind::ListType, "argument '", schema.name(), "': got a list, want ",
            schema.type()->str());
  const c10::TypePtr element = list->castRaw<c10::ListType>()->getElementType();
  if (element_kind(element) == TypeKind::TensorType) {
    source.kind = ArgSource::Kind::kSlotList;
    source.optional_elements = element->kind() == TypeKind::OptionalType;
    for (const ops::Arg& item : items) {
      source.slots.push_back(item.is_none() ? -1 : slot(std::get<ir::Value*>(item.value)));
    }
    return source;
  }
  const bool all_dims = std::all_of(items.begin(), items.end(), [](const ops::Arg& item) {
    return std::holds_alternative<ir::Dim>(item.value);
  });
  if (!all_dims || element->kind() == TypeKind::FloatType ||
      element->kind() == TypeKind::BoolType) {
    return constant(number_list(schema, items));
  }
  if (element->kind() == TypeKind::NumberType) {
    c10::impl::GenericList values(element);
    for (const ops::Arg& item : items) {
      values.push_back(IValue(std::get<ir::Dim>(item.value).constant()));
    }
    return constant(values);
  }
  for (const ops::Arg& item : items) source.dims.push_back(std::get<ir::Dim>(item.value));
  if (ir::is_constant(source.dims)) {
    c10::List<int64_t> values;
    for (const ir::Dim& dim : source.dims) values.push_back(dim.constant());
    return constant(values);
  }
  source.kind = ArgSource::Kind::kDimList;
  return source;
}

Step Resolver::bind(const c10::OperatorHandle& op, const ops::ArgList& args,
                    const ops::Call& call) const {
  const FunctionSchema& schema = op.schema();
  ORT_CHECK(args.size() <= schema.arguments().size(), call.op, ": got ", args.size(),
            " arguments, want at most ", schema.arguments().size());
  Step step;
  step.op = op;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (i < args.size()) {
      step.args.push_back(bind_arg(argument, args[i]));
    } else {
      ORT_CHECK(argument.default_value().has_value() || argument.is_out(), call.op, ": argument '",
                argument.name(), "' is missing");
      step.args.push_back(constant(argument.default_value().value_or(IValue())));
    }
  }
  for (const ir::Value* value : call.outputs) {
    step.outputs.push_back(value == nullptr ? -1 : slot(value));
  }
  step.effect = ops::has_effects(op);
  return step;
}

bool Resolver::use_out_form(const ops::Call& call, Step& step) const {
  for (const ir::Value* value : call.outputs) {
    if (value != nullptr && !value->type.is_known()) return false;
  }
  const auto output = [](int index) {
    ArgSource source;
    source.kind = ArgSource::Kind::kOutput;
    source.slots = {index};
    return source;
  };
  if (const ops::OverwriteForm* form = find_overwrite_form(call); form && call.outputs.at(0)) {
    auto op = find_op(form->op, form->overload);
    ORT_CHECK(op.has_value(), "operator ", form->op, " is not registered");
    ops::ArgList args = form->args(call.args);
    args.insert(args.begin(), ops::Arg());
    Step overwrite = bind(*op, args, call);
    overwrite.args[0] = output(0);
    overwrite.form = Form::kOut;
    overwrite.effect = is_random(*op);
    if (form->over_operands) overwrite.in_place = operands_like_result(call);
    step = std::move(overwrite);
    return true;
  }
  if (!step.op) return false;
  const auto out = find_out_form(*step.op, on_cpu_);
  if (!out || !(out->any_strides || are_row_major(call.outputs))) return false;
  // Results that nobody reads still need memory to be written to: the kernel makes it.
  if (std::any_of(step.outputs.begin(), step.outputs.end(), [](int s) { return s < 0; }))
    return false;
  step.op = out->op;
  for (size_t i = 0; i < step.outputs.size(); ++i) step.args.push_back(output(static_cast<int>(i)));
  step.form = Form::kOut;
  step.writes_gaps = out->with_gaps;
  if (out->over_operands || (on_cpu_ && out->over_rows && works_along_rows(call))) {
    step.in_place = operands_like_result(call);
  }
  return true;
}

bool Resolver::place_results(const ops::Call& call, Step& step) const {
  if (!on_cpu_ || !is_placeable(call.op)) return false;
  for (const ir::Value* value : call.outputs) {
    if (value != nullptr && !value->type.is_known()) return false;
  }
  step.form = Form::kPlaced;
  return true;
}

Step Resolver::bind_region(const ops::Call& call) const {
  Step step;
  step.form = Form::kRegion;
  step.region = call.node;
  for (const ops::Arg& arg : call.args) {
    ArgSource source;
    source.kind = ArgSource::Kind::kSlot;
    source.slots = {slot(std::get<ir::Value*>(arg.value))};
    step.args.push_back(std::move(source));
  }
  for (const ir::Value* value : call.outputs) step.outputs.push_back(slot(value));
  if (!ir::is(call.node, "Region", ir::kTorchOrtDomain)) return step;
  step.schedule = std::make_shared<region::Schedule>(region::make_schedule(*call.node));
  for (int input : step.schedule->overwritable) {
    step.in_place.push_back(step.args[input].slots[0]);
  }
  return step;
}

Step Resolver::bind_control_flow(const ops::Call& call) const {
  return bind_slots(call, Form::kControlFlow);
}

Step Resolver::bind_keep(const ops::Call& call) const { return bind_slots(call, Form::kKeep); }

Step Resolver::bind_slots(const ops::Call& call, Form form) const {
  Step step;
  step.form = form;
  for (const ops::Arg& arg : call.args) {
    ArgSource source = constant(IValue());
    if (!arg.is_none()) {
      source.kind = ArgSource::Kind::kSlot;
      source.slots = {slot(std::get<ir::Value*>(arg.value))};
    }
    step.args.push_back(std::move(source));
  }
  for (const ir::Value* value : call.outputs) {
    step.outputs.push_back(value == nullptr ? -1 : slot(value));
  }
  return step;
}

Step Resolver::resolve(const ops::Call& call) const {
  if (call.op == "torch_ort::region") return bind_region(call);
  Step step;
  if (!find_op(call.op, call.overload) && use_out_form(call, step)) return step;
  step = resolve_functional(call);
  if (step.form == Form::kFunctional && !use_out_form(call, step)) place_results(call, step);
  return step;
}

Step Resolver::resolve_functional(const ops::Call& call) const {
  auto op = find_op(call.op, call.overload);
  if (!op) {
    throw Unsupported(concat("operator ", call.op, call.overload.empty() ? "" : ".", call.overload,
                             ": no such operator is registered"));
  }
  Step step = bind(*op, call.args, call);
  const FunctionSchema& schema = op->schema();
  if (call.op == "torch_ort::call_python") {
    step.form = Form::kPython;
  } else if (call.op.starts_with("torch_ort::python_op")) {
    step.form = Form::kPythonOp;
  } else if (ops::registry().operator_row(call.op).view_or_copy) {
    step.form = Form::kReshape;
  } else if (schema.is_mutable()) {
    step.form = Form::kMutation;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      for (int slot : step.args[i].slots) {
        if (slot >= 0) step.mutates.push_back(slot);
      }
    }
    step.num_returns = schema.returns().size();
  } else if (ops::gives_view(schema)) {
    step.form = Form::kView;
  } else {
    step.may_give_argument =
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  }
  return step;
}

// Slots of the operands that have the type of the only result.
std::vector<int> Resolver::operands_like_result(const ops::Call& call) const {
  std::vector<int> slots;
  if (call.outputs.size() != 1) return slots;
  for (const ops::Arg& arg : call.args) {
    auto* value = std::get_if<ir::Value*>(&arg.value);
    if (value == nullptr || (*value)->type != call.outputs[0]->type) continue;
    const int candidate = slot(*value);
    if (std::find(slots.begin(), slots.end(), candidate) == slots.end()) slots.push_back(candidate);
  }
  return slots;
}

std::string Step::op_name() const {
  if (op) return toString(op->operator_name());
  return control_flow ? control_flow->op_name() : region->op.str();
}

}  // namespace torch_ort::run
