// Calls of torch.autograd.Function. A reader gives, besides the arguments of the operator, what
// describes the call, by the names of the node's attributes (torch_ort/python_op/).

#include "base/error.h"
#include "convert/families.h"

namespace torch_ort::convert {

namespace {

using Values = std::vector<ir::Value*>;

template <typename T>
std::vector<T> items_as(const ops::ArgList& list) {
  std::vector<T> items;
  for (const ops::Arg& item : list) items.push_back(std::get<T>(item.value));
  return items;
}

ir::Attr attr_of(const std::string& name, const ops::Arg& arg) {
  if (auto* text = std::get_if<std::string>(&arg.value)) return *text;
  if (auto* dim = std::get_if<ir::Dim>(&arg.value)) return *dim;
  const auto* list = std::get_if<ops::ArgList>(&arg.value);
  ORT_CHECK(list != nullptr, "PythonOp: attribute '", name, "' is no text, integer or list");
  if (list->empty()) return ir::Shape{};
  if (std::holds_alternative<std::string>(list->front().value)) return items_as<std::string>(*list);
  if (std::holds_alternative<double>(list->front().value)) return items_as<double>(*list);
  return ir::Shape(items_as<ir::Dim>(*list));
}

template <typename Types>
void add_types(ir::Attrs& attrs, const std::string& prefix, const Types& types) {
  ir::Shape dtypes, ranks;
  for (const ir::Type& type : types) {
    dtypes.emplace_back(static_cast<int64_t>(type.dtype));
    ranks.emplace_back(type.shape ? static_cast<int64_t>(type.shape->size()) : -1);
  }
  attrs[prefix + "_tensor_types"] = dtypes;
  attrs[prefix + "_tensor_ranks"] = ranks;
}

Values add_node(Builder& builder, const AtenCall& call, const char* op, size_t first_output) {
  Values inputs;
  std::vector<ir::Type> input_types;
  ir::Attrs attrs;
  for (size_t i = 0; i < call.args.size(); ++i) {
    const std::string& name = call.arg_names[i];
    if (name == "ctx") {
      inputs.push_back(tensor(call.args[i]));
    } else if (name == "tensors" || name == "grads") {
      for (const ops::Arg& item : std::get<ops::ArgList>(call.args[i].value)) {
        inputs.push_back(tensor(item));
        input_types.push_back(inputs.back() != nullptr ? inputs.back()->type : ir::Type());
      }
    } else {
      attrs[name] = attr_of(name, call.args[i]);
    }
  }
  add_types(attrs, "input", input_types);
  add_types(attrs, "output",
            std::vector<ir::Type>(call.types.begin() + static_cast<std::ptrdiff_t>(first_output),
                                  call.types.end()));
  return builder.node(ir::OpId{ir::kMicrosoftDomain, op}, std::move(inputs), call.types,
                      std::move(attrs));
}

Values python_op(Builder& builder, const AtenCall& call) {
  return add_node(builder, call, "PythonOp", 1);
}

Values python_op_grad(Builder& builder, const AtenCall& call) {
  return add_node(builder, call, "PythonOpGrad", 0);
}

}  // namespace

void add_python_op(Table& table) {
  table.add("torch_ort::python_op", python_op);
  table.add("torch_ort::python_op_grad", python_op_grad);
}

}  // namespace torch_ort::convert
