#include "convert/reader.h"

#include "base/error.h"
#include "ir/edit.h"

#include <set>

namespace torch_ort::convert {

namespace {

// Calls whose result is their argument, whatever it is: in a functional program a second
// name for a value is no node.
bool is_same_value(const AtenCall& call) {
  static const std::set<std::string> names = {"aten::detach", "aten::alias", "aten::lift",
                                              "aten::lift_fresh_copy", "aten::lift_fresh"};
  return names.count(call.op) > 0;
}

}  // namespace

Reader::Reader(std::string name, int max_opset)
    : graph_(std::make_unique<ir::Graph>()), builder_(*graph_, max_opset) {
  graph_->name = std::move(name);
}

void Reader::add_input(const std::string& name, ir::Type type) {
  values_[name] = &ir::add_input(*graph_, name, std::move(type));
}

void Reader::add_constant(const std::string& name, ir::Type type) {
  values_[name] = &ir::add_initializer(*graph_, name, std::move(type), nullptr);
}

void Reader::add_symbol_input(const std::string& name) { graph_->symbol_inputs.push_back(name); }

void Reader::add_size_hint(const std::string& symbol, int64_t value) {
  graph_->size_hints[symbol] = value;
}

void Reader::add_call(AtenCall call, const std::vector<std::string>& names) {
  if (is_same_value(call)) {
    values_[names.at(0)] = tensor(call.args.at(0));
    return;
  }
  const std::vector<ir::Value*> results = convert(builder_, call);
  ORT_CHECK(results.size() >= names.size(), "convert ", call.key(), ": got ", results.size(),
            " results, want ", names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    if (!names[i].empty()) values_[names[i]] = results[i];
  }
}

void Reader::add_alias(const std::string& name, const std::string& of) {
  values_[name] = value(of);
}

void Reader::add_private_clone(const std::string& of, const std::string& name, ir::Type type) {
  AtenCall call;
  call.op = "aten::clone";
  call.arg_names = {"self", "memory_format"};
  call.args = {value(of), "contiguous_format"};
  type.strides.reset();
  call.types = {std::move(type)};
  call.name = name;
  const Builder::Scope scope(builder_, call);
  values_[name] = convert_to_aten(builder_, call)[0];
  values_[name]->producer->attrs["effects"] = ir::Dim(1);
}

void Reader::add_yield(const std::vector<std::string>& outputs,
                       const std::vector<std::pair<std::string, ir::Type>>& tangents) {
  std::vector<ir::Value*> inputs;
  for (const std::string& name : outputs) inputs.push_back(value(name));
  std::vector<ir::Type> types;
  for (const auto& [name, type] : tangents) types.push_back(type);
  ir::Node& yield =
      ir::append(*graph_, {ir::kMicrosoftDomain, "YieldOp"}, inputs, types, {}, "yield");
  for (size_t i = 0; i < tangents.size(); ++i) {
    ir::rename(*graph_, *yield.outputs[i], tangents[i].first);
    values_[tangents[i].first] = yield.outputs[i];
  }
}

void Reader::set_outputs(const std::vector<std::string>& names) {
  for (const std::string& name : names) ir::add_output(*graph_, *value(name));
}

ir::Value* Reader::value(const std::string& name) const {
  auto found = values_.find(name);
  ORT_CHECK(found != values_.end() && found->second != nullptr, "convert: no value '", name, "'");
  return found->second;
}

}  // namespace torch_ort::convert
