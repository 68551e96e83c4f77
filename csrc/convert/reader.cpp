#include "convert/reader.h"

#include "base/error.h"
#include "ir/edit.h"

#include <algorithm>
#include <set>

namespace torch_ort::convert {

namespace {

// Calls whose result is their argument. In a functional program such a call only gives a value
// another name, so it becomes no node.
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

// The names of the outer graph are taken, since the body may refer to its values.
Reader::Reader(Reader& outer, std::string name)
    : outer_(&outer),
      graph_(std::make_unique<ir::Graph>()),
      builder_(*graph_, outer.builder_.max_opset()) {
  graph_->name = std::move(name);
  graph_->names = outer.graph_->names;
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

void Reader::add_control_flow(const AtenCall& call, const std::vector<std::string>& names,
                              const std::vector<std::pair<std::string, Reader*>>& bodies) {
  ir::Attrs attrs;
  for (const auto& [name, body] : bodies) attrs[name] = std::shared_ptr<ir::Graph>(body->take());
  std::vector<ir::Value*> inputs;
  for (const ops::Arg& arg : call.args) inputs.push_back(arg.is_none() ? nullptr : tensor(arg));
  const Builder::Scope scope(builder_, call);
  const std::vector<ir::Value*> results =
      builder_.node(call.op, std::move(inputs), call.types, std::move(attrs));
  for (size_t i = 0; i < names.size(); ++i) {
    if (!names[i].empty()) values_[names[i]] = results[i];
  }
}

void Reader::add_yield(const std::vector<std::string>& outputs,
                       const std::vector<std::pair<std::string, ir::Type>>& tangents) {
  std::vector<ir::Value*> inputs;
  for (const std::string& name : outputs) inputs.push_back(value(name));
  std::vector<ir::Type> types;
  for (const auto& [name, type] : tangents) types.push_back(type);
  ir::Node& yield =
      builder_.add_named("yield", {ir::kMicrosoftDomain, "YieldOp"}, std::move(inputs), types);
  for (size_t i = 0; i < tangents.size(); ++i) {
    ir::rename(*graph_, *yield.outputs[i], tangents[i].first);
    values_[tangents[i].first] = yield.outputs[i];
  }
}

// ONNX requires that the outputs of a body are made in it, and differ from each other.
void Reader::set_outputs(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    ir::Value* result = value(name);
    const bool is_given =
        std::find(graph_->outputs.begin(), graph_->outputs.end(), result) != graph_->outputs.end();
    if (outer_ != nullptr && (result->producer == nullptr || is_given)) {
      ir::Type type = result->type;
      result = builder_.node1("Identity", {result}, type);
    }
    ir::add_output(*graph_, *result);
  }
}

ir::Value* Reader::find(const std::string& name) {
  if (const auto found = values_.find(name); found != values_.end()) return found->second;
  ir::Value* outer = outer_ != nullptr ? outer_->find(name) : nullptr;
  if (outer == nullptr) return nullptr;
  ir::Value*& captured = captured_[outer];
  if (captured == nullptr) {
    graph_->names.erase(outer->name);
    captured = &ir::add_value(*graph_, outer->name, outer->type);
  }
  return captured;
}

ir::Value* Reader::value(const std::string& name) {
  ir::Value* found = find(name);
  ORT_CHECK(found != nullptr, "convert: no value '", name, "'");
  return found;
}

std::unique_ptr<ir::Graph> Reader::take() {
  if (outer_ == nullptr) {
    ir::separate_names(*graph_);
  } else {
    graph_->names.clear();
    for (const ir::Value& value : graph_->values) graph_->names.insert(value.name);
  }
  return std::move(graph_);
}

}  // namespace torch_ort::convert
