// Recomputes saved values in backward regions.
//
// Autograd's formulas decide which results of forward backward reads: for gelu(x + bias) the sum,
// for a loss the log-probabilities. If a region of the backward half can compute such a value from
// values that are saved anyway, or from fewer bytes, it is recomputed there and no longer saved. If
// a product reads the value, a region that reads its inputs anyway writes it: gelu(x) is written by
// the region of its gradient. A minimum cut chooses, by bytes that are moved and held against
// repeated work.
//
// Only what a region of the forward half computes element by element is recomputed. Another region
// then computes the same bits, unless it begins with a number that is rounded only where it is
// saved. Products, reductions and random draws without a counter are
// never repeated. No tensor of the caller's is saved that was not saved before, so that autograd
// watches the same tensors. But of a result that is returned, a forward region that reads it may
// save a copy: log-probabilities in float32 are twice as large as the logits of bfloat16 that a
// model returns beside its loss.
//
// The copy is there because backward cannot read such logits themselves: autograd would watch them,
// and a caller who edits them would get an error that eager PyTorch does not raise. It is half as
// large as the log-probabilities, and saves a pass over the logits: 10 bytes of memory traffic for
// a logit in place of 16. On the CPU, losses are computed in chunks instead where they can be
// (chunk_losses.cpp).
//
// To recompute was as fast as to save, with much lower peaks (benchmarks/results/decisions.md).

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/border/border.h"
#include "passes/border/costs.h"
#include "passes/border/mover.h"
#include "passes/border/network.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/unread.h"
#include "region/spaces.h"

#include <algorithm>
#include <map>
#include <set>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;
using Kind = ops::FusedForm::Kind;
using region::Member;

constexpr int kNone = -1;

// The most tensors of its own size that a value may be recomputed from. Without a limit each layer
// would add up the residuals of all layers before it: deeper layers would read more, and no two
// layers would have equal regions. The limit is lower where regions are compiled, because a new
// kernel costs a tenth of a second and layers differ in fewer ways with it.
constexpr size_t kMaxOrigins = 4, kMaxOriginsOfKernels = 2;

bool is_wide(const RegionGroup& group) {
  return std::any_of(group.nodes.begin(), group.nodes.end(),
                     [](const Member& each) { return ops::wants_double(*each.node, each.form); });
}

// A result of the forward half that could be recomputed in regions of the backward half, its hosts:
// numbers of Border::groups().
struct Candidate {
  Member maker;
  std::set<int> readers;  // hosts that read it
  // The host that writes it to memory, for readers that are in no region; -1 if there are none.
  int store = kNone;
  // The hosts in which it would be recomputed: those of its readers and of what is recomputed from
  // it. The number says how many other values would be recomputed from it there. Hosts without room
  // for so many are left out.
  std::map<int, size_t> hosts;

  std::set<int> targets() const {
    std::set<int> all = readers;
    if (store >= 0) all.insert(store);
    return all;
  }
};

class Candidates {
 public:
  explicit Candidates(Graph& graph) : graph_(graph), border_(graph), costs_(graph) {
    for (const Node& node : graph.nodes) order_.emplace(&node, static_cast<int>(order_.size()));
    note_hosts();
    find_possible();
    for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
      const auto found = candidates_.find(node->outputs.empty() ? nullptr : node->outputs[0]);
      if (found != candidates_.end() && !find_hosts(found->second)) candidates_.erase(found);
    }
    for (const Value& value : graph.values) note_crossing(value);
  }

  const Border& border() const { return border_; }

  const Candidate* find(const Value* value) const {
    const auto found = candidates_.find(value);
    return found == candidates_.end() ? nullptr : &found->second;
  }

  int place(const Node* node) const { return order_.at(node); }

  // The region of the backward half that the node is in; -1 if it is in none.
  int host_of(const Node* node) const {
    return border_.is_backward(node) ? border_.group_of(node) : kNone;
  }

  // The candidates to recompute, so that saving and recomputing together cost least.
  std::unordered_set<const Value*> cheapest() const {
    std::vector<const Value*> values;  // of the forward half
    std::unordered_map<const Value*, int> numbers;
    for (const Value& value : graph_.values) {
      if (border_.is_backward(value.producer)) continue;
      numbers.emplace(&value, static_cast<int>(values.size()));
      values.push_back(&value);
    }
    std::vector<std::vector<int>> inputs(values.size());
    std::vector<Rerun> makers(values.size());
    std::vector<Save> saves;
    for (size_t i = 0; i < values.size(); ++i) {
      saves.push_back({.producer = static_cast<int>(i), .cost = cost_to_cross(*values[i])});
      const Candidate* candidate = find(values[i]);
      if (candidate == nullptr) continue;
      saves[i].is_wanted = !candidate->targets().empty();
      for (const Value* input : candidate->maker.node->inputs) {
        if (input == nullptr || Border::is_constant(*input)) continue;
        inputs[i].push_back(numbers.at(input));
      }
      makers[i] = {.cost = cost_to_make(*candidate), .inputs = inputs[i]};
    }
    const std::vector<bool> is_made = cheapest_reruns(makers, saves);
    std::unordered_set<const Value*> chosen;
    for (size_t i = 0; i < values.size(); ++i) {
      if (is_made[i]) chosen.insert(values[i]);
    }
    return chosen;
  }

  // The uses that read a copy of the value if the backward half reads one: those in the first
  // region of the forward half that reads it, which then writes the copy. Empty: the value may not
  // be copied, or need not be.
  std::vector<ir::Use> copy_of(const Value& value) const {
    const Value* whole = SharedMemory::root(&value);
    const bool is_returned = memory().leaves(whole) && !memory().is_callers(whole);
    if (!is_returned || crossing_.contains(whole)) return {};
    std::map<int, std::vector<ir::Use>> uses;  // by group
    for (const ir::Use& use : value.uses) {
      if (use.node == nullptr || use.index < 0) continue;
      const int group = border_.group_of(use.node);
      if (group >= 0 && !border_.is_backward(use.node)) uses[group].push_back(use);
    }
    return uses.empty() ? std::vector<ir::Use>() : uses.begin()->second;
  }

 private:
  double cost_to_make(const Candidate& candidate) const {
    const Node& node = *candidate.maker.node;
    const auto times = static_cast<double>(std::max<size_t>(1, candidate.readers.size()));
    double cost = times * costs_.to_compute(node);
    if (candidate.store >= 0) cost += costs_.to_move(*node.outputs[0]);
    for (const Value* input : node.inputs) {
      // If the input crosses only for this value, the cost of its crossing includes the read.
      if (input == nullptr || Border::is_constant(*input) || cost_to_cross(*input) > 0) continue;
      const Value* whole = SharedMemory::root(input);
      for (const auto& [host, num_made] : candidate.hosts) {
        if (!reads_[host].contains(whole)) cost += costs_.to_move(*input);
      }
    }
    return cost;
  }

  // The cost of saving the value for backward.
  double cost_to_cross(const Value& value) const {
    const Value* whole = SharedMemory::root(&value);
    if (memory().is_written(whole)) return kNever;
    if (memory().is_callers(whole) || memory().leaves(whole)) {
      if (crossing_.contains(whole)) return whole == &value ? 0 : kNever;
      if (copy_of(value).empty()) return kNever;
      return costs_.to_hold(value) + 2 * costs_.to_move(value);
    }
    const Candidate* candidate = find(&value);
    // A view never crosses: it is made again at no cost.
    if (whole != &value && candidate != nullptr) return kNever;
    if (pinned_.contains(whole)) return 0;
    // Readers that are in no region read the value from memory in any case, so only regions count.
    size_t num_moves = is_stored(*whole) ? 0 : 1;
    const bool is_wanted = candidate != nullptr && !candidate->targets().empty();
    num_moves += is_wanted ? candidate->readers.size() : 1;
    return costs_.to_hold(*whole) + static_cast<double>(num_moves) * costs_.to_move(*whole);
  }

  const SharedMemory& memory() const { return border_.memory(); }

  void note_hosts() {
    reads_.resize(border_.groups().size());
    for (const RegionGroup& group : border_.groups()) {
      const int number = static_cast<int>(is_wide_.size());
      is_wide_.push_back(is_wide(group));
      for (const Member& each : group.nodes) {
        if (!border_.is_backward(each.node)) continue;
        for (const Value* value : each.node->inputs) {
          if (value == nullptr) continue;
          const Value* whole = SharedMemory::root(value);
          if (reads_[number].insert(whole).second) hosts_reading_[whole].push_back(number);
        }
      }
    }
  }

  // Finds the values that could be recomputed, judging by the nodes that compute them. A value that
  // depends on more than `limit` tensors of its size is left out; for the values that are made of
  // it, it counts as one tensor.
  void find_possible() {
    const size_t limit =
        ir::is_host(device_of_regions(graph_)) ? kMaxOrigins : kMaxOriginsOfKernels;
    std::unordered_map<const Value*, std::set<const Value*>> origins;
    for (Node& node : graph_.nodes) {
      if (node.is_erased() || border_.is_backward(&node)) continue;
      std::optional<Candidate> candidate = as_candidate(node);
      if (!candidate) continue;
      const Value* made = node.outputs[0];
      std::set<const Value*> found;
      for (const Value* input : node.inputs) {
        if (input == nullptr || !input->type.is_known()) continue;
        if (const auto known = origins.find(input); known != origins.end()) {
          found.insert(known->second.begin(), known->second.end());
        } else if (ir::numel(*input->type.shape) == ir::numel(*made->type.shape)) {
          found.insert(SharedMemory::root(input));
        }
      }
      if (found.size() > limit) continue;
      origins.emplace(made, std::move(found));
      candidates_.emplace(made, std::move(*candidate));
    }
  }

  // Decides in which hosts the candidate could be recomputed. False: in none. Its readers have been
  // decided on before.
  bool find_hosts(Candidate& candidate) const {
    std::vector<const Node*> memory_readers;
    for (const ir::Use& use : candidate.maker.node->outputs[0]->uses) {
      if (use.node == nullptr || (use.index < 0 && border_.is_backward(use.node))) return false;
      if (border_.is_backward(use.node)) {
        // The gradient of a largest value is that of the places where it is found again. It would
        // not be found if it was computed from a number before rounding, and they from one after.
        if (ir::is(use.node, "Equal")) return false;
        const int host = host_of(use.node);
        if (host < 0) {
          memory_readers.push_back(use.node);
          continue;
        }
        candidate.readers.insert(host);
        candidate.hosts[host] = 0;
      } else if (const Candidate* next = result_of(*use.node)) {
        for (const auto& [host, num_made] : next->hosts) add_host(candidate, host, num_made + 1);
      }
    }
    if (!memory_readers.empty()) {
      candidate.store = find_store(candidate, memory_readers);
      if (candidate.store < 0) return false;
      candidate.hosts[candidate.store] = 0;
    }
    return !candidate.hosts.empty() &&
           std::all_of(candidate.hosts.begin(), candidate.hosts.end(),
                       [&](const auto& host) { return fits(candidate, host.first); });
  }

  void add_host(Candidate& candidate, int host, size_t num_made) const {
    if (num_made + group(host).nodes.size() >= kMaxNodes) return;
    const auto [found, is_new] = candidate.hosts.try_emplace(host, num_made);
    if (!is_new) found->second = std::min(found->second, num_made);
  }

  // The first host that reads what the value is made of and does not depend on one of the readers.
  int find_store(const Candidate& candidate, const std::vector<const Node*>& readers) const {
    std::vector<const Value*> origins;
    collect_origins(*candidate.maker.node, origins);
    std::set<int> found;
    for (const Value* origin : origins) {
      const auto hosts = hosts_reading_.find(origin);
      if (hosts == hosts_reading_.end() || !origin->type.is_known()) continue;
      for (int host : hosts->second) {
        if (ir::numel(*origin->type.shape) == group(host).elements) found.insert(host);
      }
    }
    for (int host : found) {
      if (fits(candidate, host) && !is_reached(host, readers)) return host;
    }
    return kNone;
  }

  void collect_origins(const Node& node, std::vector<const Value*>& origins) const {
    const int group = border_.group_of(&node);
    for (const Value* input : node.inputs) {
      if (input == nullptr) continue;
      const Value* whole = SharedMemory::root(input);
      const bool is_inside = group >= 0 && border_.group_of(whole->producer) == group;
      if (std::find(origins.begin(), origins.end(), whole) != origins.end()) continue;
      origins.push_back(whole);
      if (is_inside) collect_origins(*whole->producer, origins);
    }
  }

  // Whether the host depends on one of the nodes. Nodes after the last one of the host need not be
  // followed, since they cannot lead into it.
  bool is_reached(int host, const std::vector<const Node*>& from) const {
    const int last = order_.at(group(host).nodes.back().node);
    std::vector<const Node*> open = from;
    std::unordered_set<const Node*> seen(from.begin(), from.end());
    while (!open.empty()) {
      const Node* node = open.back();
      open.pop_back();
      if (host_of(node) == host) return true;
      if (order_.at(node) > last) continue;
      for (const Value* value : node->outputs) {
        if (value == nullptr) continue;
        for (const ir::Use& use : value->uses) {
          if (use.node != nullptr && seen.insert(use.node).second) open.push_back(use.node);
        }
      }
    }
    return false;
  }

  std::optional<Candidate> as_candidate(Node& node) const {
    if (node.outputs.size() != 1 || node.outputs[0] == nullptr) return std::nullopt;
    if (!border_.may_repeat(node)) return std::nullopt;
    const ops::FusedForm form = ops::fused_form(node);
    const bool is_made =
        form.kind == Kind::kPointwise || form.kind == Kind::kPass || form.kind == Kind::kRandom;
    const bool is_view = form.kind == Kind::kPass && ops::is_view(node);
    if (!is_made || (border_.group_of(&node) < 0 && !is_view)) return std::nullopt;
    return Candidate{.maker = {&node, form}};
  }

  const Candidate* result_of(const Node& node) const {
    return node.outputs.size() == 1 ? find(node.outputs[0]) : nullptr;
  }

  bool fits(const Candidate& candidate, int host) const {
    const int own = border_.group_of(candidate.maker.node);
    if (own >= 0 && is_wide_[own] != is_wide_[host]) return false;
    return region::find_spaces({candidate.maker}, group(host).elements, group(host).columns)
        .has_value();
  }

  const RegionGroup& group(int number) const { return border_.groups()[number]; }

  void note_crossing(const Value& value) {
    if (border_.is_backward(value.producer)) return;
    const bool crosses =
        std::any_of(value.uses.begin(), value.uses.end(), [this](const ir::Use& use) {
          return use.node == nullptr || border_.is_backward(use.node);
        });
    if (!crosses) return;
    crossing_.insert(SharedMemory::root(&value));
    if (find(&value) == nullptr) pinned_.insert(SharedMemory::root(&value));
  }

  // Whether the forward half writes the value to memory even if it is not saved.
  bool is_stored(const Value& value) const {
    const int group = border_.group_of(value.producer);
    return group < 0 || is_read_outside(value, group);
  }

  bool is_read_outside(const Value& value, int group) const {
    return std::any_of(value.uses.begin(), value.uses.end(), [&](const ir::Use& use) {
      if (use.node == nullptr) return true;
      if (border_.is_backward(use.node)) return false;
      if (use.index == 0 && ops::is_view(*use.node)) {
        const auto& views = use.node->outputs;
        return std::any_of(views.begin(), views.end(), [&](const Value* view) {
          return view != nullptr && is_read_outside(*view, group);
        });
      }
      return border_.group_of(use.node) != group;
    });
  }

  Graph& graph_;
  const Border border_;
  const Costs costs_;
  // By group: whether it computes in double, and the whole tensors that it reads, if it is a host.
  std::vector<bool> is_wide_;
  std::vector<std::unordered_set<const Value*>> reads_;
  std::unordered_map<const Value*, std::vector<int>> hosts_reading_;  // whole tensors
  std::unordered_map<const Node*, int> order_;                        // positions in the graph
  std::unordered_map<const Value*, Candidate> candidates_;
  std::unordered_set<const Value*> crossing_;  // whole tensors
  std::unordered_set<const Value*> pinned_;    // those that cross whatever is recomputed
};

// Writes copies of the chosen nodes in front of the regions that read their results.
class Rebuilder {
 public:
  Rebuilder(Graph& graph, const Candidates& candidates)
      : graph_(graph), candidates_(candidates), chosen_(candidates.cheapest()) {
    chains_.resize(candidates.border().groups().size());
  }

  int run(PassContext& context) {
    int rewrites = 0;
    for (const Value& value : graph_.values) {
      if (!chosen_.contains(&value)) continue;
      const std::set<int> targets = candidates_.find(&value)->targets();
      if (targets.empty() || !fits(value, targets)) continue;
      if (!context.may_rewrite()) break;
      for (int host : targets) add_to_chain(&value, chains_[host].makers);
      note_uses(value);
      ++rewrites;
    }
    std::vector<Node*> makers;  // that may have lost their readers
    for (const Chain& chain : chains_) {
      write(chain);
      for (const auto& [place, maker] : chain.makers) makers.push_back(maker.node);
    }
    erase_unread(graph_, {makers.rbegin(), makers.rend()});
    return rewrites;
  }

 private:
  using Makers = std::map<int, Member>;  // by position in the graph
  struct Chain {
    Makers makers;
    // By nodes of the region, or, for a value that the region writes to memory, by other nodes.
    std::vector<ir::Use> uses;
  };

  // Adds the nodes that recompute the value. False if they are too many.
  bool add_to_chain(const Value* value, Makers& makers) const {
    const Member& maker = candidates_.find(value)->maker;
    if (!makers.emplace(candidates_.place(maker.node), maker).second) return true;
    if (makers.size() > kMaxNodes) return false;
    return std::all_of(
        maker.node->inputs.begin(), maker.node->inputs.end(), [&](const Value* input) {
          return input == nullptr || !chosen_.contains(input) || add_to_chain(input, makers);
        });
  }

  void note_uses(const Value& value) {
    const int store = candidates_.find(&value)->store;
    for (const ir::Use& use : value.uses) {
      if (use.node == nullptr || !candidates_.border().is_backward(use.node)) continue;
      const int reader = candidates_.host_of(use.node);
      if (reader >= 0 || store >= 0) chains_[reader >= 0 ? reader : store].uses.push_back(use);
    }
  }

  // Whether each region that is to recompute the value has room for it, beside what it recomputes
  // already.
  bool fits(const Value& value, const std::set<int>& targets) const {
    return std::all_of(targets.begin(), targets.end(), [&](int host) {
      const RegionGroup& group = candidates_.border().groups()[host];
      Makers makers = chains_[host].makers;
      if (!add_to_chain(&value, makers)) return false;
      std::vector<Member> nodes;
      for (const auto& [place, maker] : makers) nodes.push_back(maker);
      nodes.insert(nodes.end(), group.nodes.begin(), group.nodes.end());
      if (nodes.size() > kMaxNodes) return false;
      const auto spaces = region::find_spaces(nodes, group.elements, group.columns);
      return spaces.has_value() && spaces->operands.size() <= kMaxInputs;
    });
  }

  void write(const Chain& chain) {
    if (chain.makers.empty()) return;
    Node& first = first_of(chain.uses);
    Mover mover(graph_);
    for (const auto& [place, maker] : chain.makers) {
      for (Value* input : maker.node->inputs) {
        if (input != nullptr && mover.current(input) == input)
          mover.replace(*input, copied(*input));
      }
      if (const Node* view = same_view(*maker.node, first, mover)) {
        mover.replace(*maker.node->outputs[0], *view->outputs[0]);
      } else {
        mover.copy(*maker.node, first);
      }
    }
    for (const ir::Use& use : chain.uses) mover.redirect(use);
  }

  // What views a value in the backward half as a node of the forward half does, and before another
  // node; nullptr if nothing does. A region that reads both reads the value once then.
  const Node* same_view(const Node& view, const Node& before, const Mover& mover) const {
    if (!ops::is_view(view)) return nullptr;
    std::vector<Value*> inputs;
    for (Value* input : view.inputs) inputs.push_back(mover.current(input));
    for (const ir::Use& use : inputs[0]->uses) {
      if (use.node == nullptr || !candidates_.border().is_backward(use.node)) continue;
      const bool is_same =
          use.node->op == view.op && use.node->inputs == inputs && use.node->attrs == view.attrs;
      if (is_same && candidates_.place(use.node) < candidates_.place(&before)) return use.node;
    }
    return nullptr;
  }

  Node& first_of(const std::vector<ir::Use>& uses) const {
    const auto is_earlier = [this](const ir::Use& a, const ir::Use& b) {
      return candidates_.place(a.node) < candidates_.place(b.node);
    };
    return *std::min_element(uses.begin(), uses.end(), is_earlier)->node;
  }

  // What the backward half reads in place of a forward value: a copy, or the value itself.
  Value& copied(Value& value) {
    const auto [found, is_new] = copies_.try_emplace(&value, &value);
    if (!is_new) return *found->second;
    const std::vector<ir::Use> uses = candidates_.copy_of(value);
    if (uses.empty()) return value;
    found->second = ops::Writer(graph_, &first_of(uses)).make("Identity", {&value});
    for (const ir::Use& use : uses) ir::set_input(*use.node, use.index, found->second);
    return *found->second;
  }

  Graph& graph_;
  const Candidates& candidates_;
  const std::unordered_set<const Value*> chosen_;
  std::vector<Chain> chains_;                  // by host
  std::unordered_map<Value*, Value*> copies_;  // by forward value; itself if it is not copied
};

}  // namespace

int rebuild_values(Graph& graph, PassContext& context) {
  if (backward_nodes(graph).empty()) return 0;
  const Candidates candidates(graph);
  return Rebuilder(graph, candidates).run(context);
}

}  // namespace torch_ort::passes
