#include "ops/aten.h"

#include "base/error.h"
#include "ops/collective.h"
#include "ops/families.h"
#include "ops/op.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace torch_ort::ops {

namespace {

bool holds_tensors(const ArgList& list) {
  for (const Arg& item : list) {
    if (std::holds_alternative<ir::Value*>(item.value)) return true;
  }
  return false;
}

std::string complex_text(std::complex<double> number) {
  const std::string imaginary = ir::decimal_text(number.imag());
  return concat("(", ir::decimal_text(number.real()), imaginary.starts_with('-') ? "" : "+",
                imaginary, "j)");
}

// Reads what `complex_text` has written; nothing for other text.
std::optional<std::complex<double>> complex_of_text(std::string_view text) {
  if (!text.starts_with('(') || !text.ends_with("j)")) return std::nullopt;
  const std::string_view parts = text.substr(1, text.size() - 3);
  double real = 0, imaginary = 0;
  const char* end = parts.data() + parts.size();
  const auto first = std::from_chars(parts.data(), end, real);
  if (first.ec != std::errc() || first.ptr == end) return std::nullopt;
  const char* rest = *first.ptr == '+' ? first.ptr + 1 : first.ptr;
  const auto second = std::from_chars(rest, end, imaginary);
  if (second.ec != std::errc() || second.ptr != end) return std::nullopt;
  return std::complex<double>(real, imaginary);
}

// The text of an element of a list whose elements are neither all integers nor all doubles.
std::string element_text(const Arg& item) {
  if (auto* dim = std::get_if<ir::Dim>(&item.value)) return dim->str();
  if (auto* flag = std::get_if<bool>(&item.value)) return *flag ? "true" : "false";
  if (auto* real = std::get_if<double>(&item.value)) {
    char buffer[32];
    auto end = std::to_chars(buffer, buffer + sizeof buffer, *real).ptr;
    return {buffer, end};
  }
  if (auto* pair = std::get_if<std::complex<double>>(&item.value)) return complex_text(*pair);
  if (auto* text = std::get_if<std::string>(&item.value)) return *text;
  throw InternalError("ATen node: a list element is neither number nor text");
}

ir::Attr list_attr(const ArgList& list) {
  bool all_dims = true, all_reals = !list.empty();
  for (const Arg& item : list) {
    all_dims = all_dims && std::holds_alternative<ir::Dim>(item.value);
    all_reals = all_reals && std::holds_alternative<double>(item.value);
  }
  if (all_dims) {
    ir::Shape dims;
    for (const Arg& item : list) dims.push_back(std::get<ir::Dim>(item.value));
    return dims;
  }
  if (all_reals) {
    std::vector<double> reals;
    for (const Arg& item : list) reals.push_back(std::get<double>(item.value));
    return reals;
  }
  std::vector<std::string> texts;
  for (const Arg& item : list) texts.push_back(element_text(item));
  return texts;
}

c10::TypePtr plain(c10::TypePtr type) {
  while (type->kind() == c10::TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  return type;
}

// A number may also be given where the operator takes a tensor.
bool is_number_type(c10::TypeKind kind) {
  return kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType ||
         kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType ||
         kind == c10::TypeKind::TensorType;
}

// Reads an argument of the given type from text: "true", "0.1", "(1+2j)", "2*N",
// "contiguous_format".
Arg arg_of_text(const std::string& text, const c10::Argument& schema, const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::BoolType) return text == "true";
  const auto real_kind = plain(schema.real_type())->kind();
  const bool enumeration = real_kind == c10::TypeKind::ScalarTypeType ||
                           real_kind == c10::TypeKind::LayoutType ||
                           real_kind == c10::TypeKind::MemoryFormatType;
  if (enumeration || !is_number_type(type->kind())) return text;
  if (text == "true" || text == "false") return text == "true";
  if (const auto pair = complex_of_text(text)) return *pair;
  double real = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), real);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  const bool looks_integral = text.find_first_of(".einf") == std::string::npos;
  if (is_number && (!looks_integral || type->kind() == c10::TypeKind::FloatType)) return real;
  return ir::Dim::parse(text);
}

Arg arg_of_attr(const ir::Attr& attr, const c10::Argument& schema) {
  const c10::TypePtr type = plain(schema.type());
  if (auto* dim = std::get_if<ir::Dim>(&attr)) {
    if (type->kind() == c10::TypeKind::BoolType) return dim->constant() != 0;
    return *dim;
  }
  if (auto* real = std::get_if<double>(&attr)) return *real;
  if (auto* text = std::get_if<std::string>(&attr)) return arg_of_text(*text, schema, type);
  if (auto* dims = std::get_if<ir::Shape>(&attr)) return Arg::list(*dims);
  ArgList list;
  if (auto* reals = std::get_if<std::vector<double>>(&attr)) {
    for (double real : *reals) list.push_back(real);
    return list;
  }
  if (auto* texts = std::get_if<std::vector<std::string>>(&attr)) {
    const c10::TypePtr element = type->kind() == c10::TypeKind::ListType
                                     ? plain(type->castRaw<c10::ListType>()->getElementType())
                                     : type;
    for (const std::string& text : *texts) list.push_back(arg_of_text(text, schema, element));
    return list;
  }
  throw UserError(concat("ATen node: attribute '", schema.name(), "' is a tensor or a graph"));
}

// The default of an argument, as an attribute would give it.
Arg arg_of_default(const c10::Argument& schema) {
  const auto& value = schema.default_value();
  if (!value || value->isNone()) return Arg();
  if (value->isBool()) return value->toBool();
  if (value->isInt()) return value->toInt();
  if (value->isDouble()) return value->toDouble();
  if (value->isString()) return value->toStringRef();
  ArgList list;
  if (value->isIntList()) {
    for (int64_t item : value->toIntVector()) list.push_back(item);
    return list;
  }
  if (value->isDoubleList()) {
    for (double item : value->toDoubleVector()) list.push_back(item);
    return list;
  }
  if (value->isBoolList()) {
    for (bool item : value->toBoolList()) list.push_back(item);
    return list;
  }
  throw Unsupported(
      concat("argument '", schema.name(), "': a default value of its type is not supported"));
}

std::vector<std::string> names_attr(const ir::Node& node, const char* name) {
  auto found = node.attrs.find(name);
  if (found == node.attrs.end()) return {};
  const auto* names = std::get_if<std::vector<std::string>>(&found->second);
  if (names == nullptr) throw UserError(concat("ATen node: attribute '", name, "': want strings"));
  return *names;
}

void lower_aten(const ir::Node& node, CallList& calls) {
  Call call = decode_aten(node);
  // Captured graphs have other nodes in their place (convert/aten_conjugate.cpp).
  if (call.op == "aten::_conj" || call.op == "aten::_neg_view") {
    throw Unsupported(concat("ATen node ", call.op,
                             ": a view whose numbers are not in memory: want "
                             "aten::conj_physical or aten::neg"));
  }
  calls.calls.push_back(std::move(call));
}

}  // namespace

bool is_pytorchs(std::string_view op) { return op.starts_with("aten::"); }

bool gives_view(const c10::FunctionSchema& schema) {
  if (schema.is_mutable() || schema.returns().empty()) return false;
  if (registry().operator_row(schema.name()).gives_view) {
    return !schema.overload_name().ends_with("out");
  }
  return schema.returns()[0].alias_info() != nullptr;
}

bool is_communication(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("_c10d_functional::");
}

// Whether an operator may write to memory. The schemas of some that communicate do not say that
// they receive into an argument.
bool may_write(const c10::FunctionSchema& schema) {
  const bool only_reads = starts_collective(schema.name()) || schema.name() == kWaitTensor;
  return schema.is_mutable() || (is_communication(schema) && !only_reads);
}

bool has_effects(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  // An operator without results is called because it may raise an error.
  const bool raises =
      schema.returns().empty() || registry().operator_row(schema.name()).raises_or_reads_back;
  // All ranks communicate in the same order.
  return may_write(schema) || is_communication(schema) ||
         op.hasTag(at::Tag::nondeterministic_seeded) || raises;
}

void add_facts(const c10::OperatorHandle& op, ir::Attrs& attrs) {
  if (has_effects(op)) attrs["effects"] = ir::Dim(1);
  attrs.erase("writes");
  if (may_write(op.schema())) attrs["writes"] = ir::Dim(1);
  attrs.erase("view");
  if (gives_view(op.schema())) attrs["view"] = ir::Dim(1);
}

void encode_aten(const std::string& op, const std::string& overload,
                 const std::vector<std::string>& arg_names, const ArgList& args,
                 std::vector<ir::Value*>& inputs, ir::Attrs& attrs) {
  attrs["operator"] = op;
  attrs["overload_name"] = overload;
  std::vector<std::string> tensor_args, none_args;
  const auto schema = c10::Dispatcher::singleton().findSchema({op, overload});
  for (size_t i = 0; i < args.size(); ++i) {
    const Arg& arg = args[i];
    const std::string& name = arg_names[i];
    if (auto* value = std::get_if<ir::Value*>(&arg.value)) {
      inputs.push_back(*value);
      tensor_args.push_back(name);
    } else if (auto* list = std::get_if<ArgList>(&arg.value)) {
      if (!holds_tensors(*list)) {
        attrs[name] = list_attr(*list);
        continue;
      }
      for (const Arg& item : *list) {
        inputs.push_back(item.is_none() ? nullptr : std::get<ir::Value*>(item.value));
      }
      tensor_args.push_back(concat(name, ":", list->size()));
    } else if (auto* flag = std::get_if<bool>(&arg.value)) {
      attrs[name] = std::string(*flag ? "true" : "false");
    } else if (auto* dim = std::get_if<ir::Dim>(&arg.value)) {
      attrs[name] = *dim;
    } else if (auto* real = std::get_if<double>(&arg.value)) {
      attrs[name] = *real;
    } else if (auto* pair = std::get_if<std::complex<double>>(&arg.value)) {
      attrs[name] = complex_text(*pair);
    } else if (auto* text = std::get_if<std::string>(&arg.value)) {
      attrs[name] = *text;
    } else if (schema && i < schema->schema().arguments().size()) {
      const auto& standard = schema->schema().arguments()[i].default_value();
      if (standard && !standard->isNone()) none_args.push_back(name);
    }
  }
  if (!none_args.empty()) attrs["none_args"] = none_args;
  if (!tensor_args.empty()) attrs["tensor_args"] = tensor_args;
}

std::string key_of(const ir::Node& node) {
  if (node.op.domain.empty()) return node.op.name;
  if (!ir::is(&node, "ATen", ir::kAtenDomain)) return "";
  return ir::string_attr(node.attrs, "operator", "");
}

Call decode_aten(const ir::Node& node) {
  Call call;
  call.op = ir::string_attr(node.attrs, "operator", "");
  call.overload = ir::string_attr(node.attrs, "overload_name", "");
  call.outputs = node.outputs;
  call.node = &node;
  const auto op = c10::Dispatcher::singleton().findSchema({call.op, call.overload});
  if (!op) {
    throw Unsupported(concat("operator ", call.op, call.overload.empty() ? "" : ".", call.overload,
                             ": no such operator is registered"));
  }
  const std::vector<std::string> tensor_args = names_attr(node, "tensor_args");
  const std::vector<std::string> none_args = names_attr(node, "none_args");
  size_t next_input = 0, next_name = 0;
  const auto take_input = [&]() -> ir::Value* {
    if (next_input >= node.inputs.size()) {
      throw UserError(concat("ATen node ", call.op, ": got ", node.inputs.size(),
                             " inputs, want more for 'tensor_args'"));
    }
    return node.inputs[next_input++];
  };
  for (const c10::Argument& argument : op->schema().arguments()) {
    if (argument.is_out())
      throw UserError(concat("ATen node ", call.op, ": want a functional overload"));
    std::string entry = next_name < tensor_args.size() ? tensor_args[next_name] : "";
    const size_t colon = entry.find(':');
    if (!entry.empty() && entry.substr(0, colon) == argument.name()) {
      ++next_name;
      if (colon == std::string::npos) {
        call.args.push_back(take_input());
        continue;
      }
      int count = 0;
      std::from_chars(entry.data() + colon + 1, entry.data() + entry.size(), count);
      ArgList list;
      for (int i = 0; i < count; ++i) list.push_back(take_input());
      call.args.push_back(list);
      continue;
    }
    if (auto found = node.attrs.find(argument.name()); found != node.attrs.end()) {
      call.args.push_back(arg_of_attr(found->second, argument));
    } else if (plain(argument.type())->kind() == c10::TypeKind::ListType &&
               argument.type()->kind() != c10::TypeKind::OptionalType &&
               !argument.default_value().has_value()) {
      // Nodes do not store empty lists of tensors.
      call.args.push_back(ArgList());
    } else if (std::find(none_args.begin(), none_args.end(), argument.name()) != none_args.end()) {
      call.args.push_back(Arg());
    } else {
      call.args.push_back(arg_of_default(argument));
    }
  }
  if (next_name != tensor_args.size() || next_input != node.inputs.size()) {
    throw UserError(concat("ATen node ", call.op, ": 'tensor_args' does not fit the schema ",
                           toString(op->schema())));
  }
  return call;
}

void register_aten(Registry& ops) {
  ops.add({
      .name = "ATen",
      .domain = ir::kAtenDomain,
      .min_inputs = 0,
      .max_inputs = -1,
      .max_outputs = -1,
      .any_attributes = true,
      .lower = lower_aten,
  });
  // Operators that belong to no family.
  for (const char* name : {"aten::_assert_async", "aten::_assert_scalar",
                           "aten::_assert_tensor_metadata", "aten::_local_scalar_dense",
                           "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"}) {
    ops.add(Operator{.name = name, .raises_or_reads_back = true});
  }
  ops.add(Operator{.name = "aten::_cdist_backward", .check = check_distance_backward});
  for (const char* name : {"aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c"}) {
    ops.add(Operator{.name = name, .check = check_transform});
  }
  ops.add(Operator{.name = "aten::_pdist_backward", .check = check_pairwise_distance_backward});
  ops.add(Operator{.name = "aten::_pdist_forward", .check = check_pairwise_distance});
}

}  // namespace torch_ort::ops
