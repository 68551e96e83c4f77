#include "ops/file_check.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/attributes.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/permission.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_set>

namespace torch_ort::ops {

namespace {

using c10::TypeKind;
using ir::Graph;
using ir::Node;
using ir::Value;

constexpr std::string_view kDTypes[] = {
    "float32",       "float64",         "float16",     "bfloat16",       "uint8",
    "int8",          "uint16",          "int16",       "uint32",         "int32",
    "uint64",        "int64",           "bool",        "complex64",      "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"};
constexpr std::string_view kMemoryFormats[] = {"contiguous_format", "preserve_format",
                                               "channels_last", "channels_last_3d"};

template <typename Got, typename Want>
[[noreturn]] void raise(const Node& node, const std::string& what, const Got& got,
                        const Want& want) {
  throw UserError(
      concat(node.op.str(), ": ", what, " of node '", node.name, "': got ", got, ", want ", want));
}

template <size_t kSize>
bool is_one_of(const std::string_view (&names)[kSize], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool is_device(const std::string& name) {
  return name == "cpu" || name == "cuda" ||
         (name.starts_with("cuda:") && name.size() <= 7 &&
          name.find_first_not_of("0123456789", 5) == name.npos);
}

// ---- calls of operators

bool is_number(const Arg& arg) {
  return std::holds_alternative<bool>(arg.value) || std::holds_alternative<double>(arg.value) ||
         std::holds_alternative<ir::Dim>(arg.value);
}

bool is_complex(const Arg& arg) { return std::holds_alternative<std::complex<double>>(arg.value); }

bool is_text(const Arg& arg, bool (*is_good)(const std::string&)) {
  const auto* text = std::get_if<std::string>(&arg.value);
  return text != nullptr && is_good(*text);
}

c10::TypePtr innermost(c10::TypePtr type) {
  while (type->kind() == TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  return type;
}

// Whether an argument has the type that the schema requires. `real` is the type in which
// enumerations differ from integers.
bool fits(const Arg& arg, const c10::TypePtr& type, const c10::TypePtr& real) {
  const bool is_constant =
      !std::holds_alternative<ir::Dim>(arg.value) || std::get<ir::Dim>(arg.value).is_constant();
  switch (real->kind()) {
    case TypeKind::OptionalType: {
      const auto inner = [](const c10::TypePtr& optional) {
        return optional->castRaw<c10::OptionalType>()->getElementType();
      };
      return arg.is_none() || fits(arg, inner(type), inner(real));
    }
    case TypeKind::ListType: {
      const c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      const c10::TypePtr real_element = real->castRaw<c10::ListType>()->getElementType();
      const auto* list = std::get_if<ArgList>(&arg.value);
      // A list of integers may be given by one integer.
      if (list == nullptr) {
        return element->kind() == TypeKind::IntType && std::holds_alternative<ir::Dim>(arg.value);
      }
      const bool holds_flags = element->kind() == TypeKind::BoolType;
      const bool holds_tensors = innermost(element)->kind() == TypeKind::TensorType;
      return std::all_of(list->begin(), list->end(), [&](const Arg& item) {
        return !(holds_tensors && (is_number(item) || is_complex(item))) &&
               !(holds_flags && !std::holds_alternative<bool>(item.value)) &&
               fits(item, element, real_element);
      });
    }
    case TypeKind::TensorType:
      return std::holds_alternative<ir::Value*>(arg.value) || is_number(arg) || is_complex(arg);
    case TypeKind::NumberType: return is_number(arg) || is_complex(arg);
    case TypeKind::FloatType:
      return is_constant && is_number(arg) && !std::holds_alternative<bool>(arg.value);
    case TypeKind::IntType:
    case TypeKind::SymIntType: return std::holds_alternative<ir::Dim>(arg.value);
    case TypeKind::BoolType:
      return std::holds_alternative<bool>(arg.value) ||
             (std::holds_alternative<ir::Dim>(arg.value) && is_constant);
    case TypeKind::StringType:
    // The name of a group of ranks, in place of which PyTorch takes the group itself.
    case TypeKind::AnyType: return std::holds_alternative<std::string>(arg.value);
    case TypeKind::ScalarTypeType:
      return is_text(arg, [](const std::string& name) { return is_one_of(kDTypes, name); });
    case TypeKind::LayoutType:
      return is_text(arg, [](const std::string& name) { return name == "strided"; });
    case TypeKind::MemoryFormatType:
      return is_text(arg, [](const std::string& name) { return is_one_of(kMemoryFormats, name); });
    case TypeKind::DeviceObjType: return is_text(arg, is_device);
    default: return false;
  }
}

// Gives the node as many outputs as the operator has. Files may leave out the last ones.
void settle_outputs(Node& node, const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  const bool gives_lists = std::any_of(returns.begin(), returns.end(), [](const auto& result) {
    return result.type()->kind() == TypeKind::ListType;
  });
  if (gives_lists) return;
  size_t most = returns.size();
  if (schema.is_mutable()) most += schema.arguments().size();  // the arguments that it has written
  if (node.outputs.size() > most)
    raise(node, "outputs", node.outputs.size(), concat("at most ", most));
  if (node.outputs.size() < returns.size()) node.outputs.resize(returns.size(), nullptr);
}

void check_call(Node& node, const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const Call call = decode_aten(node);
  for (size_t i = 0; i < call.args.size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (fits(call.args[i], argument.type(), argument.real_type())) continue;
    raise(node, concat("argument '", argument.name(), "' of ", call.op),
          call.args[i].is_none() ? "none" : "one of another kind", argument.real_type()->str());
  }
  const bool looks_at_number =
      gives_view(schema) && !std::holds_alternative<ir::Value*>(call.args[0].value);
  if (looks_at_number) raise(node, concat("argument 0 of ", call.op), "a number", "a tensor");
  settle_outputs(node, schema);
  if (ir::has_attr(node.attrs, "binds_symbol") && call.op != "aten::_local_scalar_dense") {
    raise(node, "binds_symbol", call.op, "an operator that gives a number");
  }
  add_facts(op, node.attrs);
}

// ---- nodes

bool is_loop(const Node& node) { return node.op.name == "Loop"; }

// The first two inputs of a Loop, the number of rounds and the condition, are optional.
bool is_required(const Node& node, const Op& op, size_t slot) {
  if (is_loop(node)) return slot >= 2 && node.op.domain.empty();
  const bool takes_any_number = op.max_inputs < 0 && node.op.domain != ir::kMicrosoftDomain;
  return takes_any_number || slot < static_cast<size_t>(op.min_inputs);
}

void check_slots(const Node& node, const Op& op) {
  check_inputs(node);
  for (size_t slot = 0; slot < node.inputs.size(); ++slot) {
    if (node.inputs[slot] != nullptr || !is_required(node, op, slot)) continue;
    throw UserError(
        concat(node.op.str(), ": input ", slot, " is missing (node '", node.name, "')"));
  }
  const auto count = static_cast<int>(node.outputs.size());
  if (op.max_outputs >= 0 && count > op.max_outputs) {
    // ONNX may define more outputs than this engine has.
    if (op.domain.empty()) {
      throw Unsupported(concat(op.name, ": outputs of node '", node.name, "': got ", count,
                               ", want at most ", op.max_outputs));
    }
    raise(node, "outputs", count, concat("at most ", op.max_outputs));
  }
  const auto num_left_out = std::count(node.outputs.begin(), node.outputs.end(), nullptr);
  const bool needs_all = op.domain == ir::kTorchOrtDomain && !ir::has_attr(node.attrs, "carried");
  const bool may_have_none = op.domain == ir::kMicrosoftDomain || !ir::bodies(node).empty();
  if ((needs_all && num_left_out > 0) || (!may_have_none && count == num_left_out)) {
    raise(node, "outputs", concat(num_left_out, " left out of ", count),
          needs_all ? "all of them" : "one or more");
  }
}

// A node of an older opset may have attributes that the current op lacks.
void check_attributes(const Node& node, const Op& op, bool is_older) {
  if (op.any_attributes) return;
  const bool is_own = node.op.domain == ir::kTorchOrtDomain;
  for (const auto& [name, attr] : node.attrs) {
    const auto rule =
        std::find_if(op.attributes.begin(), op.attributes.end(),
                     [&, &name = name](const auto& each) { return name == each.name; });
    if (rule == op.attributes.end()) {
      if (is_older) continue;
      std::string names;
      for (const AttrRule& each : op.attributes)
        names += concat(names.empty() ? "" : ", ", each.name);
      raise(node, "attributes", concat("'", name, "'"), names.empty() ? "none" : names);
    }
    if (!is_of_kind(attr, rule->kind, is_own)) {
      raise(node, concat("attribute '", name, "'"), "one of another kind", text_of(rule->kind));
    }
  }
  for (const AttrRule& rule : op.attributes) {
    if (rule.is_required && !is_older && !ir::has_attr(node.attrs, rule.name)) {
      raise(node, "attributes", "too few", concat("'", rule.name, "'"));
    }
  }
}

// A region node must have as many spaces, inputs and outputs as its body.
void check_region(const Node& node) {
  const Graph& body = region_body(node);
  const auto check = [&node](const char* what, size_t got, size_t want) {
    if (got != want) raise(node, what, got, concat(want, ", as many as its body has"));
  };
  check("spaces", ir::strings_attr(node.attrs, "spaces", {}).size(), body.inputs.size());
  const bool has_row_list = ir::int_attr(node.attrs, "has_row_list", 0) != 0;
  check("inputs", node.inputs.size(), body.inputs.size() + (has_row_list ? 1 : 0));
  check("outputs", node.outputs.size(), body.outputs.size());
  if (body.outputs.empty()) raise(node, "outputs", 0, "one or more");
}

// The operator of PyTorch that a node calls; nothing if it calls none or PyTorch does not have it.
std::optional<c10::OperatorHandle> operator_of(const Node& node) {
  if (!ir::is(&node, "ATen", ir::kAtenDomain)) return std::nullopt;
  return c10::Dispatcher::singleton().findSchema(
      {ir::string_attr(node.attrs, "operator", ""),
       ir::string_attr(node.attrs, "overload_name", "")});
}

constexpr std::string_view kWrittenInPlace =
    "which the forward half writes in place, want a value that the backward half may keep";

class FileChecker {
 public:
  explicit FileChecker(const std::vector<std::string>& allow) : allow_(allow) {}

  // `opset` is that of the file, since bodies have none of their own.
  void check(Graph& graph, int64_t opset, bool is_body) const {
    for (const Value& value : graph.values) {
      const std::string& kind = value.type.device.kind;
      if (kind == "cpu" || kind == "cuda") continue;
      throw UserError(
          concat("file: device of value '", value.name, "': got ", kind, ", want cpu or cuda"));
    }
    const Node* yield = nullptr;
    std::unordered_set<const Value*> written;
    for (Node& node : graph.nodes) {
      if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) {
        if (yield != nullptr) {
          throw UserError(concat("YieldOp: got nodes '", yield->name, "' and '", node.name,
                                 "', want at most one in a graph"));
        }
        yield = &node;
      }
      check_node(node, opset, is_body);
      for (const auto& body : ir::bodies(node)) check(*body, opset, true);
      if (yield == nullptr) {
        add_written(node, written);
      } else {
        check_not_written(node, written);
      }
    }
    for (const Value* output : graph.outputs) {
      if (yield == nullptr || !written.contains(output)) continue;
      throw UserError(
          concat("file: output of the graph: got '", output->name, "', ", kWrittenInPlace));
    }
  }

 private:
  // Collects values that operators of the forward half have written to. Such memory may belong to
  // the caller, and autograd counts no versions of it, so the backward half cannot know whether it
  // was changed since.
  static void add_written(const Node& node, std::unordered_set<const Value*>& written) {
    if (node.inputs.empty()) return;
    const auto op = operator_of(node);
    const bool is_view_of_one = written.contains(node.inputs[0]) && ops::is_view(node);
    if (!is_view_of_one && !(op && op->schema().is_mutable())) return;
    for (const Value* output : node.outputs) {
      if (output != nullptr) written.insert(output);
    }
  }

  static void check_not_written(const Node& node, const std::unordered_set<const Value*>& written) {
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (!written.contains(node.inputs[i])) continue;
      throw UserError(concat(node.op.str(), ": input ", i, " of node '", node.name, "': got '",
                             node.inputs[i]->name, "', ", kWrittenInPlace));
    }
  }

  // Ops without a kernel raise an error with their name when they are lowered.
  void check_node(Node& node, int64_t opset, bool is_body) const {
    if (ir::is(&node, "ATen", ir::kAtenDomain)) {
      check_operator(node, is_body);
      return;
    }
    const Op* op = registry().find(node.op);
    if (op == nullptr) return;
    const bool runs_python =
        node.op.domain == ir::kMicrosoftDomain && !op->pure && op->lower != nullptr;
    if (runs_python && !is_allowed(node.op.str()))
      refuse(node, node.op.str(), "which runs Python code");
    const bool is_older = node.op.domain.empty() && opset > 0 && op->since > opset;
    if (!is_older) check_slots(node, *op);
    check_attributes(node, *op, is_older);
    if (ir::is(&node, "Region", ir::kTorchOrtDomain)) check_region(node);
  }

  void check_operator(Node& node, bool is_body) const {
    for (const char* name : {"operator", "overload_name"}) {
      const auto found = node.attrs.find(name);
      if (found == node.attrs.end() || std::holds_alternative<std::string>(found->second)) continue;
      raise(node, concat("attribute '", name, "'"), "one of another kind", "a string");
    }
    const std::string name = ir::string_attr(node.attrs, "operator", "");
    const auto op = operator_of(node);
    if (!op) return;
    const std::string reason = reason_to_refuse(*op);
    const bool is_refused = !reason.empty() && (is_body || !gives_to_input(node, name));
    if (is_refused && !is_allowed(name) && !is_allowed(name.substr(0, name.find(':')))) {
      refuse(node, name, reason);
    }
    check_call(node, *op);
  }

  // Captured graphs write the new values of buffers in this way.
  static bool gives_to_input(const Node& node, const std::string& op) {
    const Value* target = node.inputs.empty() ? nullptr : node.inputs[0];
    return op == "aten::copy_" && target != nullptr && target->producer == nullptr &&
           target->data == nullptr;
  }

  bool is_allowed(const std::string& name) const {
    return std::any_of(allow_.begin(), allow_.end(),
                       [&name](const std::string& entry) { return entry == "*" || entry == name; });
  }

  [[noreturn]] static void refuse(const Node& node, const std::string& name,
                                  const std::string& reason) {
    throw UserError(concat("file: operator of node '", node.name, "': got ", name, ", ", reason,
                           ", want one that only computes; allow=['", name,
                           "'] lets files run it"));
  }

  const std::vector<std::string>& allow_;
};

}  // namespace

void check_file(Graph& graph, const std::vector<std::string>& allow) {
  FileChecker(allow).check(graph, graph.opset, false);
}

}  // namespace torch_ort::ops
