// start(a), start(b), ... -> one coalesced collective
//
// of neighbours that communicate among the same ranks in the same way, up to a size at which a
// collective takes as long for its bytes as for being one. PyTorch's coalesced forms take and give
// separate tensors, so that nothing is copied here. What the first ones start then waits for the
// operands of the last one, unless all operands can be there before the first, as those are that a
// layer gathers: inputs of the graph, or what is made of inputs alone. Sizes must be constants:
// those of a captured call may differ between ranks, which would then communicate differently.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/collective.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/border/costs.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"

#include <algorithm>
#include <string>
#include <unordered_map>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

constexpr int64_t kBucketBytes = 1 << 20;
// Casts and views lead to what is gathered, and away from what is reduced; so many for each.
constexpr size_t kMostMoved = 8;

// The coalesced form of an operator; empty if there is none.
std::string coalesced(const std::string& op) {
  for (const char* name :
       {"_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_reduce",
        "_c10d_functional::reduce_scatter_tensor"}) {
    if (op == name) return op + "_coalesced";
  }
  return "";
}

class Buckets {
 public:
  explicit Buckets(Graph& graph) : graph_(graph), memory_(graph), costs_(graph) {}

  int run(PassContext& context) {
    int rewrites = 0;
    // A bucket that was given up, since another one has moved what it reads, may be found smaller.
    for (int more = 1; more > 0; rewrites += more) more = join_all(context);
    return rewrites;
  }

 private:
  int join_all(PassContext& context) {
    int rewrites = 0;
    number();
    for (const auto& bucket : find()) {
      if (bucket.size() < 2) continue;
      if (rewrites > 0) number();
      const std::vector<const Node*> all(bucket.begin(), bucket.end());
      const bool is_at_first = stands_at_first(all);
      if ((!is_at_first && !stands_at_last(all)) || !context.may_rewrite()) continue;
      join(bucket, is_at_first);
      ++rewrites;
    }
    return rewrites;
  }

  void number() {
    places_.clear();
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      if (is_border(&node)) {
        border_ = static_cast<int>(places_.size());
        num_tangents_ = node.outputs.size();
      }
      places_[&node] = static_cast<int>(places_.size());
    }
  }

  std::vector<std::vector<Node*>> find() {
    std::vector<std::vector<Node*>> buckets;
    std::vector<int64_t> bytes;
    std::vector<size_t> open;  // at most one for each way to communicate
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      // Other effects stay where they are among the collectives.
      if (is_border(&node) || (!ops::is_pure(node) && !ops::is_wait(node) && !is_one(node)))
        open.clear();
      if (!is_one(node)) continue;
      const int64_t more = bytes_of(node);
      const auto same = std::find_if(open.begin(), open.end(), [&](size_t bucket) {
        return is_alike(*buckets[bucket].front(), node);
      });
      if (same != open.end() && bytes[*same] + more <= kBucketBytes &&
          joins(buckets[*same], node)) {
        buckets[*same].push_back(&node);
        bytes[*same] += more;
        continue;
      }
      if (same != open.end()) open.erase(same);
      open.push_back(buckets.size());
      buckets.push_back({&node});
      bytes.push_back(more);
    }
    return buckets;
  }

  static bool is_alike(const Node& a, const Node& b) {
    return a.attrs == b.attrs && a.inputs[0]->type.dtype == b.inputs[0]->type.dtype;
  }

  // Whether a node has a coalesced form, constant sizes, and one wait for its result.
  bool is_one(const Node& node) const {
    if (!ops::is_collective(node)) return false;
    if (coalesced(ops::key_of(node)).empty()) return false;
    const Value* result = node.outputs.size() == 1 ? node.outputs[0] : nullptr;
    const auto has_constant_sizes = [](const Value* value) {
      return value != nullptr && value->type.is_known() && ir::is_constant(*value->type.shape);
    };
    if (!has_constant_sizes(node.inputs[0]) || !has_constant_sizes(result)) return false;
    // If gradients of some outputs do not come, those of some parameters do not, either, and a
    // bucket would have numbers for them.
    if (is_backward(node) && num_tangents_ > 1) return false;
    return result != nullptr && result->uses.size() == 1 && result->uses[0].node != nullptr &&
           ops::is_wait(*result->uses[0].node) && result->uses[0].node->outputs[0] != nullptr &&
           is_backward(*result->uses[0].node) == is_backward(node);
  }

  bool is_backward(const Node& node) const { return border_ >= 0 && places_.at(&node) > border_; }

  int64_t bytes_of(const Node& node) const {
    return std::max(costs_.num_bytes(*node.inputs[0]), costs_.num_bytes(*node.outputs[0]));
  }

  bool joins(const std::vector<Node*>& bucket, const Node& node) const {
    std::vector<const Node*> all(bucket.begin(), bucket.end());
    all.push_back(&node);
    return stands_at_first(all) || stands_at_last(all);
  }

  // Whether all operands are made before the first one, or can be.
  bool stands_at_first(const std::vector<const Node*>& bucket) const {
    std::vector<Node*> makers;
    return find_makers(bucket, makers);
  }

  // The nodes behind the first one that make the operands, each after those that it reads. False if
  // there are others than casts, views and regions.
  bool find_makers(const std::vector<const Node*>& bucket, std::vector<Node*>& makers) const {
    return std::all_of(bucket.begin(), bucket.end(), [&](const Node* each) {
      const size_t most = makers.size() + kMostMoved;
      return can_stand_before(*each->inputs[0], *bucket.front(), makers, most);
    });
  }

  bool can_stand_before(const Value& value, const Node& place, std::vector<Node*>& makers,
                        size_t most) const {
    Node* maker = value.producer;
    if (maker == nullptr || places_.at(maker) < places_.at(&place)) return true;
    if (std::find(makers.begin(), makers.end(), maker) != makers.end()) return true;
    const bool is_light = ops::is_view(*maker) || ir::is(maker, "Cast") ||
                          ir::is(maker, "Region", ir::kTorchOrtDomain);
    if (!is_light || !ops::is_pure(*maker) || makers.size() >= most) return false;
    const bool is_made =
        std::all_of(maker->inputs.begin(), maker->inputs.end(), [&](const Value* input) {
          return input == nullptr ||
                 (!memory_.is_written(input) && can_stand_before(*input, place, makers, most));
        });
    if (is_made) makers.push_back(maker);
    return is_made;
  }

  // Whether nothing reads a result before the last one, or must.
  bool stands_at_last(const std::vector<const Node*>& bucket) const {
    return std::all_of(bucket.begin(), bucket.end(), [&](const Node* each) {
      const Value* result = each->outputs[0]->uses[0].node->outputs[0];
      std::vector<Node*> readers;
      return result == nullptr || find_readers(*result, *bucket.back(), readers);
    });
  }

  // The nodes before `place` that read a value, or what others of them make. False if there are
  // others than pure ones, or many.
  bool find_readers(const Value& value, const Node& place, std::vector<Node*>& readers) const {
    return std::all_of(value.uses.begin(), value.uses.end(), [&](const ir::Use& use) {
      if (use.node == nullptr || places_.at(use.node) > places_.at(&place)) return true;
      if (!ops::is_pure(*use.node) || readers.size() == kMostMoved) return false;
      if (std::find(readers.begin(), readers.end(), use.node) == readers.end())
        readers.push_back(use.node);
      const auto& made = use.node->outputs;
      return std::all_of(made.begin(), made.end(), [&](const Value* result) {
        return result == nullptr || find_readers(*result, place, readers);
      });
    });
  }

  void join(const std::vector<Node*>& bucket, bool is_at_first) {
    const std::vector<const Node*> all(bucket.begin(), bucket.end());
    Node& place = is_at_first ? *bucket.front() : *bucket.back();
    std::vector<Node*> makers;
    if (is_at_first) find_makers(all, makers);
    for (Node* maker : makers) ir::move_before(graph_, *maker, place);
    std::vector<Value*> operands;
    std::vector<ir::Type> types;
    for (const Node* each : bucket) {
      operands.push_back(each->inputs[0]);
      types.push_back(each->outputs[0]->type);
    }
    ir::Attrs attrs = bucket.front()->attrs;
    attrs["operator"] = coalesced(ops::key_of(*bucket.front()));
    attrs["tensor_args"] = std::vector<std::string>{"inputs:" + std::to_string(bucket.size())};
    ops::Writer write(graph_, &place);
    Node& start =
        write.add_named("bucket", {ir::kAtenDomain, "ATen"}, operands, types, std::move(attrs));
    places_[&start] = places_.at(&place);
    for (size_t i = 0; i < bucket.size(); ++i) {
      Node& old = *bucket[i]->outputs[0]->uses[0].node;
      std::vector<Node*> readers;
      if (!is_at_first) find_readers(*old.outputs[0], place, readers);
      Node& wait = write.copy(old, {start.outputs[i]}, {old.outputs[0]->type});
      places_[&wait] = places_.at(&place);
      std::sort(readers.begin(), readers.end(),
                [this](Node* a, Node* b) { return places_.at(a) < places_.at(b); });
      for (Node* reader : readers) ir::move_before(graph_, *reader, place);
      ir::replace_uses(*old.outputs[0], *wait.outputs[0], graph_);
      ir::erase(graph_, old);
    }
    for (Node* each : bucket) ir::erase(graph_, *each);
  }

  Graph& graph_;
  const SharedMemory memory_;
  const Costs costs_;
  std::unordered_map<const Node*, int> places_;
  int border_ = -1;
  size_t num_tangents_ = 0;
};

}  // namespace

int bucket_collectives(Graph& graph, PassContext& context) {
  if (!ops::has_collectives(graph)) return 0;
  return Buckets(graph).run(context);
}

}  // namespace torch_ort::passes
