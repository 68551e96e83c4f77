// Two pure nodes of one op with equal attributes and the same inputs -> the first of them. Only
// within one half of a training graph: if a backward node read the result of a forward node, that
// result would be saved for backward. Values that are returned or written are not merged.

#include "ir/edit.h"
#include "ops/op.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"

#include <unordered_map>

namespace torch_ort::passes {

namespace {

template <typename T>
void add_raw(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void add_text(std::string& key, std::string_view text) {
  add_raw(key, text.size());
  key += text;
}

void add_attr(std::string& key, const ir::Attr& attr) {
  add_raw(key, attr.index());
  if (const auto* dim = std::get_if<ir::Dim>(&attr)) {
    add_text(key, dim->str());
  } else if (const auto* real = std::get_if<double>(&attr)) {
    add_raw(key, *real);
  } else if (const auto* text = std::get_if<std::string>(&attr)) {
    add_text(key, *text);
  } else if (const auto* shape = std::get_if<ir::Shape>(&attr)) {
    add_text(key, ir::to_string(*shape));
  } else if (const auto* reals = std::get_if<std::vector<double>>(&attr)) {
    add_raw(key, reals->size());
    for (double number : *reals) add_raw(key, number);
  } else if (const auto* texts = std::get_if<std::vector<std::string>>(&attr)) {
    add_raw(key, texts->size());
    for (const std::string& item : *texts) add_text(key, item);
  } else if (const auto* data = std::get_if<std::shared_ptr<const ir::TensorData>>(&attr)) {
    add_raw(key, (*data)->dtype);
    add_raw(key, (*data)->shape.size());
    for (int64_t size : (*data)->shape) add_raw(key, size);
    add_text(key, {reinterpret_cast<const char*>((*data)->bytes), (*data)->num_bytes});
  } else {
    // Subgraphs are not compared: one is equal only to itself.
    add_raw(key, std::get<std::shared_ptr<ir::Graph>>(attr).get());
  }
}

// Small constants are compared by their bytes, because each call of an operator has constants of
// its own. Other inputs are compared by identity.
void add_input(std::string& key, const ir::Value* input) {
  constexpr size_t kFewBytes = 64;
  const bool is_small = input != nullptr && input->producer == nullptr && input->data != nullptr &&
                        input->data->bytes != nullptr && input->data->num_bytes <= kFewBytes;
  if (!is_small) return add_raw(key, input);
  add_text(key, ir::to_string(input->type));
  add_text(key, ir::to_string(input->type.device));
  add_attr(key, ir::Attr(input->data));
}

// Two nodes have the same key if and only if they are equal.
std::string key_of(const ir::Node& node) {
  std::string key;
  add_text(key, node.op.domain);
  add_text(key, node.op.name);
  // Recomputed nodes of two checkpoints are not merged, because each checkpoint is recomputed on
  // its own.
  add_text(key, node.recompute);
  add_raw(key, node.checkpoint);
  add_raw(key, node.inputs.size());
  for (const ir::Value* input : node.inputs) add_input(key, input);
  for (const auto& [name, attr] : node.attrs) {
    add_text(key, name);
    add_attr(key, attr);
  }
  return key;
}

bool can_merge(const ir::Node& node, const SharedMemory& memory) {
  if (!ops::is_pure(node) || node.outputs.empty()) return false;
  for (const ir::Value* input : node.inputs) {
    if (input != nullptr && memory.is_written(input)) return false;
  }
  for (const ir::Value* output : node.outputs) {
    if (output != nullptr && (memory.leaves(output) || memory.is_written(output))) return false;
  }
  return true;
}

bool gives_all_of(const ir::Node& kept, const ir::Node& node) {
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] == nullptr) continue;
    if (i >= kept.outputs.size() || kept.outputs[i] == nullptr) return false;
    if (!(kept.outputs[i]->type == node.outputs[i]->type)) return false;
  }
  return true;
}

}  // namespace

int merge_equal(ir::Graph& graph, PassContext& context) {
  const SharedMemory memory(graph);
  std::unordered_map<std::string, ir::Node*> first;
  int rewrites = 0;
  for (ir::Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    if (is_border(&node)) {
      first.clear();
      continue;
    }
    if (!can_merge(node, memory)) continue;
    const auto [found, is_first] = first.try_emplace(key_of(node), &node);
    if (is_first || !gives_all_of(*found->second, node)) continue;
    if (!context.may_rewrite()) return rewrites;

    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] != nullptr)
        ir::replace_uses(*node.outputs[i], *found->second->outputs[i], graph);
    }
    ir::erase(graph, node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
