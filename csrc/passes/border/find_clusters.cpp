// Numbers the nodes of the captured graph, and names clusters that could be recomputed, if a
// Selection asks for that by name (passes/border/budget.h). This comes early because later passes
// replace nodes: an attention becomes one node, and a norm becomes many.

#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/border/budget.h"
#include "passes/border/clusters.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;
using Kind = ops::FusedForm::Kind;

constexpr int kNone = -1;

bool is_known_without_tensors(const Value& value) {
  if (value.producer == nullptr) return value.data != nullptr;
  return value.producer->inputs.empty();
}

// The name of an op in the name of a cluster. Operators of PyTorch lose their namespace, because
// the colons in it separate the fields of a list of clusters.
std::string op_name(const Node& node) {
  if (node.op.domain != ir::kAtenDomain) return node.op.name;
  std::string name = ir::string_attr(node.attrs, "operator", node.op.name);
  if (const size_t colons = name.rfind("::"); colons != std::string::npos) {
    name = name.substr(colons + 2);
  }
  return name;
}

bool is_called(const Node& node, std::string_view part) {
  return op_name(node).find(part) != std::string::npos;
}

// Views, random draws, and nodes that a region computes element by element.
bool is_basic(const Node& node) {
  const ops::Work& work = ops::work_of(node);
  if (work.elementwise || work.keeps_elements || ops::is_view(node)) return true;
  if (ir::is(&node, "Dropout")) return true;
  const Kind kind = ops::fused_form(node).kind;
  return kind == Kind::kPointwise || kind == Kind::kPass || kind == Kind::kConcat ||
         kind == Kind::kGather;
}

bool may_run_again(const Node& node, bool is_extended) {
  // The engine's dropout draws by a counter, so it draws the same mask again.
  if (ir::is(&node, "Dropout")) return true;
  if (!ops::is_pure(node) || !ir::bodies(node).empty()) return false;
  return is_extended || is_basic(node);
}

// A norm, and the sum after it that adds the input of the norm to what the layer has computed from
// it.
struct Residual {
  int begin = kNone;  // the first node that reads the input
  int norm = kNone;
  int sum = kNone;
};

class Namer {
 public:
  Namer(Graph& graph, bool is_extended)
      : is_extended_(is_extended), backward_(backward_nodes(graph)) {
    for (Node& node : graph.nodes) {
      if (node.is_erased() || backward_.contains(&node)) continue;
      if (is_border(&node)) continue;
      node.captured = static_cast<int>(nodes_.size());
      nodes_.push_back(&node);
    }
    if (backward_.empty()) return;
    find_stashed();
    find_layers();
    name_layers();
    name_subgraphs();
  }

  Clusters take() { return std::move(found_); }

 private:
  bool is_forward(const Node* node) const { return node != nullptr && !backward_.contains(node); }

  // Finds the values whose memory backward reads.
  void find_stashed() {
    for (const Node* node : nodes_) {
      for (const Value* output : node->outputs) {
        if (output == nullptr) continue;
        const auto& uses = output->uses;
        const bool is_read = std::any_of(uses.begin(), uses.end(), [this](const ir::Use& use) {
          return use.node != nullptr && backward_.contains(use.node);
        });
        const Value* root = SharedMemory::root(output);
        if (!is_read || root->producer == nullptr || root->producer->inputs.empty()) continue;
        stashed_.push_back(output);
        stashed_roots_.insert(root);
      }
    }
  }

  // ---- layers

  // The value that a value is a cast or reshape of.
  static const Value* origin(const Value* value) {
    while (value->producer != nullptr && ops::work_of(*value->producer).keeps_elements &&
           !value->producer->inputs.empty() && value->producer->inputs[0] != nullptr) {
      value = value->producer->inputs[0];
    }
    return value;
  }

  // The value whose square is taken, if `value` is a square; else nullptr.
  static const Value* squared(const Value* value) {
    const Node* node = origin(value)->producer;
    if (node == nullptr || node->inputs.size() != 2) return nullptr;
    if (ir::is(node, "Pow")) {
      const auto power = ops::known_double(node->inputs[1]);
      return power && *power == 2 ? origin(node->inputs[0]) : nullptr;
    }
    const bool is_square = ir::is(node, "Mul") && node->inputs[0] == node->inputs[1];
    return is_square ? origin(node->inputs[0]) : nullptr;
  }

  // The value that a node normalizes; nullptr if the node is no norm. If a program spells out the
  // norm, the node is the mean of squares at its beginning.
  static const Value* normalized(const Node& node) {
    if (node.inputs.empty() || node.inputs[0] == nullptr) return nullptr;
    if (ir::is(&node, "LayerNormalization") || is_called(node, "RMSNormalization") ||
        is_called(node, "rms_norm") || is_called(node, "SimplifiedLayerNormalization")) {
      return origin(node.inputs[0]);
    }
    if (!ir::is(&node, "ReduceMean")) return nullptr;
    const Value* x = squared(node.inputs[0]);
    if (x == nullptr || x->producer == nullptr || !ir::is(x->producer, "Sub")) return x;
    // A layer norm subtracts the mean before it squares.
    const Node* mean = x->producer->inputs[1]->producer;
    const bool is_centred = mean != nullptr && ir::is(mean, "ReduceMean");
    return is_centred ? origin(x->producer->inputs[0]) : x;
  }

  // The last sum that adds to a value, or to a cast, reshape or dropout of it, and has the size of
  // the norm. Nodes before `from` do not count.
  int last_sum(const Value& value, const Value& like, int from) const {
    int last = kNone;
    for (const ir::Use& use : value.uses) {
      if (!is_forward(use.node) || use.node->captured < 0 || use.node->outputs.empty()) continue;
      const Node& reader = *use.node;
      const Value* made = reader.outputs[0];
      if (made == nullptr) continue;
      const bool is_passed = ops::work_of(reader).keeps_elements || ir::is(&reader, "Dropout");
      if (is_passed && use.index == 0) {
        last = std::max(last, last_sum(*made, like, from));
      } else if (ir::is(&reader, "Add") && reader.captured > from && adds_results(reader) &&
                 made->type.is_known() && like.type.is_known() &&
                 ir::numel(*made->type.shape) == ir::numel(*like.type.shape)) {
        last = std::max(last, reader.captured);
      }
    }
    return last;
  }

  // Whether neither operand of the sum is a parameter.
  static bool adds_results(const Node& sum) {
    return std::none_of(sum.inputs.begin(), sum.inputs.end(), [](const Value* input) {
      return input == nullptr || (input->producer == nullptr && input->data != nullptr) ||
             !input->type.is_known() || input->type.shape->size() < 2;
    });
  }

  int first_reader(const Value& value) const {
    int first = kNone;
    for (const ir::Use& use : value.uses) {
      if (!is_forward(use.node) || use.node->captured < 0) continue;
      first = first == kNone ? use.node->captured : std::min(first, use.node->captured);
    }
    return first;
  }

  static bool is_attention(const Node& node) {
    return ir::is(&node, "Softmax") || is_called(node, "_softmax") ||
           is_called(node, "attention") || is_called(node, "Attention");
  }

  void find_layers() {
    found_.layer_of.assign(nodes_.size(), Clusters::kNoLayer);
    std::vector<Residual> residuals;
    std::vector<int> attentions;
    for (const Node* node : nodes_) {
      if (is_attention(*node)) attentions.push_back(node->captured);
      const Value* x = normalized(*node);
      if (x == nullptr) continue;
      Residual residual{.begin = first_reader(*x), .norm = node->captured};
      residual.sum = last_sum(*x, *x, node->captured);
      if (residual.sum == kNone && !ir::is(node, "ReduceMean") && node->outputs[0] != nullptr) {
        residual.sum = last_sum(*node->outputs[0], *x, node->captured);
      }
      if (residual.sum != kNone && residual.begin != kNone) residuals.push_back(residual);
    }
    const auto holds_attention = [&](const Residual& residual) {
      const auto next = std::upper_bound(attentions.begin(), attentions.end(), residual.norm);
      return next != attentions.end() && *next < residual.sum;
    };
    std::set<int> begins;
    for (const Residual& residual : residuals) {
      if (holds_attention(residual)) begins.insert(residual.begin);
    }
    if (begins.empty()) return;
    int end = kNone;
    for (const Residual& residual : residuals) {
      if (residual.begin >= *begins.rbegin()) end = std::max(end, residual.sum);
    }
    int layer = kNone;
    for (int node = *begins.begin(); node <= end; ++node) {
      if (begins.contains(node)) ++layer;
      found_.layer_of[node] = layer;
    }
    found_.num_layers = layer + 1;
    found_.first = *begins.begin();
  }

  // Names the layers as clusters; layers with the same ops have the same name. Masks and the like
  // are left out, because only the first layer may contain them: they do not depend on activations.
  void name_layers() {
    if (found_.num_layers == 0) return;
    std::vector<std::vector<int>> named(found_.num_layers), numbers(found_.num_layers);
    const std::vector<bool> is_needed = needed_in_layers(), is_made = made_in_layers();
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const int layer = found_.layer_of[i];
      if (layer == Clusters::kNoLayer) continue;
      numbers[layer].push_back(static_cast<int>(i));
      if (is_needed[i] && is_made[i]) named[layer].push_back(static_cast<int>(i));
    }
    for (int layer = 0; layer < found_.num_layers; ++layer) {
      if (!named[layer].empty()) add(name_of(named[layer]), true, std::move(numbers[layer]));
    }
  }

  // By node, whether backward reads a value of the same layer that depends on it.
  std::vector<bool> needed_in_layers() const {
    std::vector<bool> is_needed(nodes_.size(), false);
    const auto note = [&](const Value* value) {
      if (value != nullptr && value->producer != nullptr && value->producer->captured >= 0) {
        is_needed[value->producer->captured] = true;
      }
    };
    for (const Value* value : stashed_) {
      if (!enters_another(*value)) note(value);
    }
    for (size_t i = nodes_.size(); i-- > 0;) {
      if (!is_needed[i]) continue;
      for (const Value* input : nodes_[i]->inputs) {
        if (input == nullptr || input->producer == nullptr) continue;
        const bool is_same = found_.layer(*input->producer) == found_.layer_of[i];
        if (is_same && !enters_another(*input)) note(input);
      }
    }
    return is_needed;
  }

  // Whether a node of another layer reads the value.
  bool enters_another(const Value& value) const {
    const int layer = found_.layer(*value.producer);
    return std::any_of(value.uses.begin(), value.uses.end(), [&](const ir::Use& use) {
      return is_forward(use.node) && use.node->captured >= 0 && found_.layer(*use.node) != layer;
    });
  }

  // By node, whether it is in a layer and depends on what enters the first layer.
  std::vector<bool> made_in_layers() const {
    std::vector<bool> is_made(nodes_.size(), false);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const int layer = found_.layer_of[i];
      if (layer == Clusters::kNoLayer) continue;
      const bool begins = i == 0 || found_.layer_of[i - 1] != layer;
      const auto& inputs = nodes_[i]->inputs;
      is_made[i] = begins || normalized(*nodes_[i]) != nullptr ||
                   std::any_of(inputs.begin(), inputs.end(), [&](const Value* input) {
                     return input != nullptr && input->producer != nullptr &&
                            input->producer->captured >= 0 && is_made[input->producer->captured];
                   });
    }
    return is_made;
  }

  // ---- subgraphs, each of which computes one value

  void name_subgraphs() {
    for (const Value* value : stashed_) {
      std::set<int> numbers;
      if (collect(*value->producer, *SharedMemory::root(value), numbers)) {
        std::vector<int> in_order(numbers.begin(), numbers.end());
        std::string name = name_of(in_order);
        add(std::move(name), false, std::move(in_order));
      }
    }
  }

  // Whether the node may run again. Collects it and, in the same way, the nodes that it depends on,
  // as far as backward does not read their results anyway.
  bool collect(const Node& node, const Value& of, std::set<int>& numbers) const {
    if (!may_run_again(node, is_extended_)) return false;
    if (!numbers.insert(node.captured).second) return true;
    for (const Value* input : node.inputs) {
      if (input == nullptr || is_known_without_tensors(*input)) continue;
      const Value* root = SharedMemory::root(input);
      if (root->producer == nullptr) continue;
      if (root != &of && stashed_roots_.contains(root)) continue;
      collect(*input->producer, of, numbers);
    }
    return true;
  }

  std::string name_of(const std::vector<int>& numbers) const {
    std::string name;
    for (int number : numbers) name += op_name(*nodes_[number]) + "+";
    return name;
  }

  void add(std::string name, bool is_layer, std::vector<int> numbers) {
    const auto [found, is_new] = index_of_.try_emplace(name, found_.all.size());
    if (is_new)
      found_.all.push_back({.name = std::move(name), .is_layer = is_layer, .occurrences = {}});
    auto& occurrences = found_.all[found->second].occurrences;
    // Two values may have the same subgraph: results of one node, or views of one result.
    if (std::find(occurrences.begin(), occurrences.end(), numbers) == occurrences.end()) {
      occurrences.push_back(std::move(numbers));
    }
  }

  const bool is_extended_;
  const std::unordered_set<const Node*> backward_;
  std::vector<Node*> nodes_;  // of the forward half, by number
  std::vector<const Value*> stashed_;
  std::unordered_set<const Value*> stashed_roots_;
  std::unordered_map<std::string, size_t> index_of_;
  Clusters found_;
};

}  // namespace

Clusters name_clusters(Graph& graph, bool is_extended) { return Namer(graph, is_extended).take(); }

int find_clusters(Graph& graph, PassContext& context) {
  // Bodies of If and Loop have no backward half.
  if (context.selection == nullptr || backward_nodes(graph).empty()) return 0;
  const bool is_extended = context.selection->is_extended;
  context.clusters = std::make_shared<const Clusters>(name_clusters(graph, is_extended));
  return 0;
}

}  // namespace torch_ort::passes
