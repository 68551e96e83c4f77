#include "run/steps/operator.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/host_operators.h"
#include "ops/kernel_checks.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/dtype.h"

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

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

// The value of a string argument, by the type that the schema declares.
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

// The 0-d tensor that stands for a Python number. It takes no part in type promotion.
at::Tensor wrapped_number(const c10::Scalar& number) {
  at::Tensor tensor = at::scalar_tensor(number, at::TensorOptions().dtype(number.type()));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

ArgSource source_of(const CallSite& site, const c10::Argument& schema, const ops::Arg& arg) {
  ArgSource source;
  // Formulas of autograd omit tensors that the schema declares as required.
  if (arg.is_none())
    return ArgSource::of_constant(schema.type()->kind() == TypeKind::TensorType ? at::Tensor()
                                                                                : IValue());
  if (auto* value = std::get_if<ir::Value*>(&arg.value)) {
    source.kind = ArgSource::Kind::kSlot;
    source.slots = {site.slot(*value)};
    return source;
  }
  // A number where the operator takes a tensor becomes a 0-d tensor.
  const bool wraps = element_kind(schema.type()) == TypeKind::TensorType;
  if (auto* flag = std::get_if<bool>(&arg.value)) {
    return wraps ? ArgSource::of_constant(wrapped_number(*flag)) : ArgSource::of_constant(*flag);
  }
  if (auto* real = std::get_if<double>(&arg.value)) {
    return wraps ? ArgSource::of_constant(wrapped_number(*real)) : ArgSource::of_constant(*real);
  }
  if (auto* pair = std::get_if<std::complex<double>>(&arg.value)) {
    const c10::complex<double> number(*pair);
    return wraps ? ArgSource::of_constant(wrapped_number(number)) : ArgSource::of_constant(number);
  }
  if (auto* text = std::get_if<std::string>(&arg.value))
    return ArgSource::of_constant(string_value(schema, *text));
  if (auto* dim = std::get_if<ir::Dim>(&arg.value)) {
    const TypeKind wanted = element_kind(schema.type());
    if (dim->is_constant()) {
      if (wraps) return ArgSource::of_constant(wrapped_number(dim->constant()));
      if (wanted == TypeKind::ListType)
        return ArgSource::of_constant(c10::List<int64_t>({dim->constant()}));
      if (takes_double(schema)) return ArgSource::of_constant(static_cast<double>(dim->constant()));
      if (wanted == TypeKind::BoolType) return ArgSource::of_constant(dim->constant() != 0);
      return ArgSource::of_constant(dim->constant());
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
      source.slots.push_back(item.is_none() ? -1 : site.slot(std::get<ir::Value*>(item.value)));
    }
    return source;
  }
  const bool all_dims = std::all_of(items.begin(), items.end(), [](const ops::Arg& item) {
    return std::holds_alternative<ir::Dim>(item.value);
  });
  if (!all_dims || element->kind() == TypeKind::FloatType ||
      element->kind() == TypeKind::BoolType) {
    return ArgSource::of_constant(number_list(schema, items));
  }
  if (element->kind() == TypeKind::NumberType) {
    c10::impl::GenericList values(element);
    for (const ops::Arg& item : items) {
      values.push_back(IValue(std::get<ir::Dim>(item.value).constant()));
    }
    return ArgSource::of_constant(values);
  }
  for (const ops::Arg& item : items) source.dims.push_back(std::get<ir::Dim>(item.value));
  if (ir::is_constant(source.dims)) {
    c10::List<int64_t> values;
    for (const ir::Dim& dim : source.dims) values.push_back(dim.constant());
    return ArgSource::of_constant(values);
  }
  source.kind = ArgSource::Kind::kDimList;
  return source;
}

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

void push_arg(const Context& context, const BoundArg& arg, torch::jit::Stack& stack) {
  const auto lookup = [&context](const std::string& name) { return context.symbol(name); };
  switch (arg.kind) {
    case BoundArg::Kind::kConstant: stack.emplace_back(arg.constant); return;
    case BoundArg::Kind::kSlot: stack.emplace_back(context.slots[arg.slot]); return;
    case BoundArg::Kind::kTensorList: stack.emplace_back(tensor_list(context, *arg.source)); return;
    case BoundArg::Kind::kUnbackedDim: {
      const int64_t value = eval_dims(arg.source->dims, lookup)[0];
      stack.emplace_back(arg.source->as_tensor ? IValue(wrapped_number(value)) : IValue(value));
      return;
    }
    case BoundArg::Kind::kUnbackedDimList:
      stack.emplace_back(eval_dims(arg.source->dims, lookup));
      return;
  }
}

BoundArg bind_arg(const ArgSource& source, const std::vector<int>& outputs,
                  const ir::SymbolLookup& lookup) {
  BoundArg bound;
  bound.source = &source;
  switch (source.kind) {
    case ArgSource::Kind::kConstant:
      bound.kind = BoundArg::Kind::kConstant;
      bound.constant = source.constant;
      return bound;
    case ArgSource::Kind::kSlot:
      bound.kind = BoundArg::Kind::kSlot;
      bound.slot = source.slots[0];
      return bound;
    case ArgSource::Kind::kOutput:
      bound.kind = BoundArg::Kind::kSlot;
      bound.slot = outputs[source.slots[0]];
      return bound;
    case ArgSource::Kind::kSlotList: bound.kind = BoundArg::Kind::kTensorList; return bound;
    case ArgSource::Kind::kDim:
    case ArgSource::Kind::kDimList: break;
  }
  const bool list = source.kind == ArgSource::Kind::kDimList;
  c10::List<int64_t> values;
  for (const ir::Dim& dim : source.dims) {
    std::optional<int64_t> value = dim.evaluate(lookup);
    if (!value) {
      bound.kind = list ? BoundArg::Kind::kUnbackedDimList : BoundArg::Kind::kUnbackedDim;
      return bound;
    }
    values.push_back(*value);
  }
  bound.kind = BoundArg::Kind::kConstant;
  if (list)
    bound.constant = values;
  else if (source.as_tensor)
    bound.constant = wrapped_number(values.get(0));
  else
    bound.constant = values.get(0);
  return bound;
}

}  // namespace

ArgSource ArgSource::of_constant(IValue value) {
  ArgSource source;
  source.kind = Kind::kConstant;
  source.constant = std::move(value);
  return source;
}

ArgSource ArgSource::of_output(int index) {
  ArgSource source;
  source.kind = Kind::kOutput;
  source.slots = {index};
  return source;
}

OperatorStep::OperatorStep(const CallSite& site, const c10::OperatorHandle& called,
                           const ops::ArgList& given)
    : op(called) {
  const c10::FunctionSchema& schema = op.schema();
  ORT_CHECK(given.size() <= schema.arguments().size(), site.call.op, ": got ", given.size(),
            " arguments, want at most ", schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (i < given.size()) {
      args.push_back(source_of(site, argument, given[i]));
    } else {
      ORT_CHECK(argument.default_value().has_value() || argument.is_out(), site.call.op,
                ": argument '", argument.name(), "' is missing");
      args.push_back(ArgSource::of_constant(argument.default_value().value_or(IValue())));
    }
  }
  outputs = site.output_slots();
  effect = ops::has_effects(op);
}

std::string OperatorStep::op_name() const { return toString(op.operator_name()); }

std::vector<int> OperatorStep::reads() const {
  std::vector<int> slots;
  for (const ArgSource& arg : args) {
    if (arg.kind != ArgSource::Kind::kSlot && arg.kind != ArgSource::Kind::kSlotList) continue;
    slots.insert(slots.end(), arg.slots.begin(), arg.slots.end());
  }
  return without_repeats(slots);
}

std::string OperatorStep::why_host_is_needed() const { return ops::why_host_is_needed(op); }

std::vector<ir::Dim> OperatorStep::dims() const {
  std::vector<ir::Dim> dims;
  for (const ArgSource& arg : args) dims.insert(dims.end(), arg.dims.begin(), arg.dims.end());
  return dims;
}

std::vector<BoundArg> OperatorStep::bind_args(const Binder& binder) const {
  std::vector<BoundArg> bound;
  for (const ArgSource& source : args) bound.push_back(bind_arg(source, outputs, binder.lookup()));
  return bound;
}

void OperatorStep::call(Context& context, const std::vector<BoundArg>& bound) const {
  context.stack.clear();
  for (const BoundArg& arg : bound) push_arg(context, arg, context.stack);
  if (context.graph().options.is_from_file) ops::check_kernel_arguments(op, context.stack);
  op.callBoxed(&context.stack);
}

void OperatorStep::store_results(Context& context) const {
  if (!binds_symbol.empty()) {
    const c10::Scalar number = context.stack.at(0).toScalar();
    ORT_CHECK(number.isIntegral(true), "run: ", name, ": got a number that is no integer");
    context.unbacked_symbols.emplace_back(binds_symbol, number.toLong());
    return;
  }
  size_t next = 0;  // the next result, with lists flattened
  const auto take = [&](at::Tensor tensor) {
    if (next < outputs.size()) context.store(outputs[next++], std::move(tensor));
  };
  for (IValue& result : context.stack) {
    if (result.isTensor()) {
      take(std::move(result).toTensor());
    } else if (result.isTensorList()) {
      for (const IValue& element : result.toListRef()) take(element.toTensor());
    } else {
      // The result is None or a number.
      ++next;
    }
  }
}

std::vector<int> operands_like_result(const CallSite& site) {
  std::vector<int> slots;
  if (site.call.outputs.size() != 1) return slots;
  for (const ops::Arg& arg : site.call.args) {
    auto* value = std::get_if<ir::Value*>(&arg.value);
    if (value == nullptr || (*value)->type != site.call.outputs[0]->type) continue;
    const int candidate = site.slot(*value);
    if (std::find(slots.begin(), slots.end(), candidate) == slots.end()) slots.push_back(candidate);
  }
  return slots;
}

}  // namespace torch_ort::run
