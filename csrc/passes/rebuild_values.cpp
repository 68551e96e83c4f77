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

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "passes/min_cut.h"
#include "passes/region_groups.h"
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

// The unit of costs is a tenth of the time in which a byte moves to or from memory. To move a byte
// costs:
constexpr int64_t kMove = 10;
// To hold a byte from one half to the other. This costs more than moving it, because memory that is
// free earlier is used again while it is in a cache. Measured: writing gelu(x) a second time, in
// the region of its gradient, takes no longer than holding it.
constexpr int64_t kHold = 30;
// To compute one element of a plain, a slow and the slowest operation.
constexpr int64_t kPlainWork = 4, kSlowWork = 25, kSlowestWork = 60;

// The most tensors of its own size that a value may be recomputed from. Without a limit each layer
// would add up the residuals of all layers before it: deeper layers would read more, and no two
// layers would have equal regions. The limit is lower where regions are compiled, because a new
// kernel costs a tenth of a second and layers differ in fewer ways with it.
constexpr size_t kMaxOrigins = 4, kMaxOriginsOfKernels = 2;

int64_t work(const ops::FusedForm& form) {
  if (form.kind == Kind::kPass) return 0;
  if (form.kind == Kind::kRandom) return kSlowestWork;
  switch (ops::word(form.op).cost) {
    case ops::Cost::kPlain: return kPlainWork;
    case ops::Cost::kSlow: return kSlowWork;
    case ops::Cost::kCostly: return kSlowestWork;
  }
  return kSlowestWork;
}

// Whether the value is known without a tensor: a constant, or made of sizes alone. Both halves may
// read it.
bool is_constant(const Value& value) {
  if (value.producer == nullptr) return value.data != nullptr;
  return value.producer->inputs.empty() &&
         (ir::is(value.producer, "Dims", ir::kTorchOrtDomain) ||
          ir::is(value.producer, "SizeRatio", ir::kTorchOrtDomain));
}

// A region of the backward half, and the tensors that it reads. Of views it holds the whole
// tensors.
struct Host {
  RegionGroup group;
  bool is_wide = false;
  std::unordered_set<const Value*> reads;
};

bool is_wide(const RegionGroup& group) {
  return std::any_of(group.nodes.begin(), group.nodes.end(),
                     [](const Member& each) { return ops::wants_double(*each.node, each.form); });
}

// A result of the forward half that could be recomputed in a region of the backward half.
struct Candidate {
  Member maker;
  std::set<int> readers;  // hosts that read it
  // The host that writes it to memory, for readers that are in no region; -1 if there are none.
  int store = -1;
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
  explicit Candidates(Graph& graph)
      : graph_(graph), memory_(graph), sizes_(graph), backward_(backward_nodes(graph)) {
    for (const Node& node : graph.nodes) order_.emplace(&node, static_cast<int>(order_.size()));
    find_groups();
    find_possible();
    for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
      if (!node->is_erased() && !backward_.contains(&*node)) consider(*node);
    }
    for (const Value& value : graph.values) note_crossing(value);
  }

  const std::vector<Host>& hosts() const { return hosts_; }

  const Candidate* find(const Value* value) const {
    const auto found = candidates_.find(value);
    return found == candidates_.end() ? nullptr : &found->second;
  }

  bool is_backward(const Node* node) const { return backward_.contains(node); }

  int place(const Node* node) const { return order_.at(node); }

  // The number of the region of the backward half that the node is in; -1 if it is in none.
  int host_of(const Node* node) const {
    const auto found = host_of_.find(node);
    return found == host_of_.end() ? -1 : found->second;
  }

  // The forward values that the backward half reads and could recompute.
  std::vector<const Value*> wanted() const {
    std::vector<const Value*> values;
    for (const Value& value : graph_.values) {
      const Candidate* candidate = find(&value);
      if (candidate != nullptr && !candidate->targets().empty()) values.push_back(&value);
    }
    return values;
  }

  int64_t cost_to_make(const Candidate& candidate) const {
    const Node& node = *candidate.maker.node;
    const auto times = static_cast<int64_t>(std::max<size_t>(1, candidate.readers.size()));
    int64_t cost = times * work(candidate.maker.form) * count(*node.outputs[0]);
    if (candidate.store >= 0) cost += kMove * num_bytes(*node.outputs[0]);
    for (const Value* input : node.inputs) {
      // If the input crosses only for this value, the cost of its crossing includes the read.
      if (input == nullptr || is_constant(*input) || cost_to_cross(*input) > 0) continue;
      const Value* whole = SharedMemory::root(input);
      for (const auto& [host, num_made] : candidate.hosts) {
        if (!hosts_[host].reads.contains(whole)) cost += kMove * num_bytes(*input);
      }
    }
    return cost;
  }

  // The uses that read a copy of the value if the backward half reads one: those in the first
  // region of the forward half that reads it, which then writes the copy. Empty: the value may not
  // be copied, or need not be.
  std::vector<ir::Use> copy_of(const Value& value) const {
    const Value* whole = SharedMemory::root(&value);
    const bool is_returned = memory_.leaves(whole) && !memory_.is_callers(whole);
    if (!is_returned || crossing_.contains(whole)) return {};
    std::map<int, std::vector<ir::Use>> uses;  // by group
    for (const ir::Use& use : value.uses) {
      if (use.node == nullptr || use.index < 0) continue;
      const auto group = group_of_.find(use.node);
      if (group != group_of_.end()) uses[group->second].push_back(use);
    }
    return uses.empty() ? std::vector<ir::Use>() : uses.begin()->second;
  }

  // The cost of saving the value for backward.
  int64_t cost_to_cross(const Value& value) const {
    const Value* whole = SharedMemory::root(&value);
    if (memory_.is_written(whole)) return MinCut::kInfinite;
    if (memory_.is_callers(whole) || memory_.leaves(whole)) {
      if (crossing_.contains(whole)) return whole == &value ? 0 : MinCut::kInfinite;
      if (copy_of(value).empty()) return MinCut::kInfinite;
      return num_bytes(value) * (kHold + 2 * kMove);
    }
    const Candidate* candidate = find(&value);
    // A view never crosses: it is made again at no cost.
    if (whole != &value && candidate != nullptr) return MinCut::kInfinite;
    if (pinned_.contains(whole)) return 0;
    // Readers that are in no region read the value from memory in any case, so only regions count.
    int64_t num_reads = 1;
    if (candidate != nullptr && !candidate->targets().empty()) {
      num_reads = static_cast<int64_t>(candidate->readers.size());
    }
    const int64_t bytes = num_bytes(*whole);
    return bytes * (kHold + kMove * num_reads + (is_stored(*whole) ? 0 : kMove));
  }

 private:
  int64_t count(const Value& value) const {
    return hinted_size(graph_, ir::numel(*value.type.shape)).value_or(0);
  }

  int64_t num_bytes(const Value& value) const {
    return value.type.is_known() ? count(value) * ir::size_bytes(value.type.dtype) : 0;
  }

  void find_groups() {
    for (RegionGroup& group : region_groups(graph_)) {
      const bool wide = is_wide(group);
      if (!backward_.contains(group.nodes.front().node)) {
        for (const Member& each : group.nodes) is_wide_[each.node] = wide;
        for (const Member& each : group.nodes) group_of_[each.node] = num_forward_;
        ++num_forward_;
        continue;
      }
      Host host{.group = std::move(group), .is_wide = wide};
      const int number = static_cast<int>(hosts_.size());
      for (const Member& each : host.group.nodes) {
        host_of_[each.node] = number;
        for (const Value* value : each.node->inputs) {
          if (value == nullptr) continue;
          const Value* whole = SharedMemory::root(value);
          if (host.reads.insert(whole).second) hosts_reading_[whole].push_back(number);
        }
      }
      hosts_.push_back(std::move(host));
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
      if (node.is_erased() || backward_.contains(&node)) continue;
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
      possible_.emplace(&node, std::move(*candidate));
    }
  }

  // Decides in which hosts the result of the node could be recomputed. Its readers have been
  // decided on before.
  void consider(Node& node) {
    const auto possible = possible_.find(&node);
    if (possible == possible_.end()) return;
    Candidate* candidate = &possible->second;
    std::vector<const Node*> memory_readers;
    for (const ir::Use& use : node.outputs[0]->uses) {
      if (use.node == nullptr || (use.index < 0 && backward_.contains(use.node))) return;
      if (backward_.contains(use.node)) {
        // The gradient of a largest value is that of the places where it is found again. It would
        // not be found if it was computed from a number before rounding, and they from one after.
        if (ir::is(use.node, "Equal")) return;
        const int host = host_of(use.node);
        if (host < 0) {
          memory_readers.push_back(use.node);
          continue;
        }
        candidate->readers.insert(host);
        candidate->hosts[host] = 0;
      } else if (const Candidate* next = result_of(*use.node)) {
        for (const auto& [host, num_made] : next->hosts) add_host(*candidate, host, num_made + 1);
      }
    }
    if (!memory_readers.empty()) {
      candidate->store = find_store(*candidate, memory_readers);
      if (candidate->store < 0) return;
      candidate->hosts[candidate->store] = 0;
    }
    const bool fits =
        std::all_of(candidate->hosts.begin(), candidate->hosts.end(),
                    [&](const auto& host) { return this->fits(*candidate, hosts_[host.first]); });
    if (!candidate->hosts.empty() && fits) {
      candidates_.emplace(node.outputs[0], std::move(*candidate));
    }
  }

  void add_host(Candidate& candidate, int host, size_t num_made) const {
    if (num_made + hosts_[host].group.nodes.size() >= kMaxNodes) return;
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
        if (ir::numel(*origin->type.shape) == hosts_[host].group.elements) found.insert(host);
      }
    }
    for (int host : found) {
      if (fits(candidate, hosts_[host]) && !is_reached(host, readers)) return host;
    }
    return -1;
  }

  void collect_origins(const Node& node, std::vector<const Value*>& origins) const {
    const auto group = group_of_.find(&node);
    for (const Value* input : node.inputs) {
      if (input == nullptr) continue;
      const Value* whole = SharedMemory::root(input);
      const auto maker = group_of_.find(whole->producer);
      const bool is_inside =
          group != group_of_.end() && maker != group_of_.end() && maker->second == group->second;
      if (std::find(origins.begin(), origins.end(), whole) != origins.end()) continue;
      origins.push_back(whole);
      if (is_inside) collect_origins(*whole->producer, origins);
    }
  }

  // Whether the host depends on one of the nodes. Nodes after the last one of the host need not be
  // followed, since they cannot lead into it.
  bool is_reached(int host, const std::vector<const Node*>& from) const {
    const int last = order_.at(hosts_[host].group.nodes.back().node);
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
    if (node.recompute == "must_save" || node.recompute == "prefer_save") return std::nullopt;
    const ops::FusedForm form = ops::fused_form(node);
    const bool is_made =
        form.kind == Kind::kPointwise || form.kind == Kind::kPass || form.kind == Kind::kRandom;
    const bool is_view = form.kind == Kind::kPass && ops::is_view(node);
    if (!is_made || !(group_of_.contains(&node) || is_view)) return std::nullopt;
    const Value& whole = *SharedMemory::root(node.outputs[0]);
    const bool is_in_reach =
        whole.type.is_known() && sizes_.are_known(whole) && !memory_.is_written(&whole);
    if (!is_in_reach) return std::nullopt;
    return Candidate{.maker = {&node, form}};
  }

  const Candidate* result_of(const Node& node) const {
    return node.outputs.size() == 1 ? find(node.outputs[0]) : nullptr;
  }

  bool fits(const Candidate& candidate, const Host& host) const {
    const auto wide = is_wide_.find(candidate.maker.node);
    if (wide != is_wide_.end() && wide->second != host.is_wide) return false;
    return region::find_spaces({candidate.maker}, host.group.elements, host.group.columns)
        .has_value();
  }

  void note_crossing(const Value& value) {
    if (value.producer != nullptr && backward_.contains(value.producer)) return;
    const bool crosses = std::any_of(
        value.uses.begin(), value.uses.end(),
        [this](const ir::Use& use) { return use.node == nullptr || backward_.contains(use.node); });
    if (!crosses) return;
    crossing_.insert(SharedMemory::root(&value));
    if (find(&value) == nullptr) pinned_.insert(SharedMemory::root(&value));
  }

  // Whether the forward half writes the value to memory even if it is not saved.
  bool is_stored(const Value& value) const {
    const auto group = group_of_.find(value.producer);
    return group == group_of_.end() || is_read_outside(value, group->second);
  }

  bool is_read_outside(const Value& value, int group) const {
    return std::any_of(value.uses.begin(), value.uses.end(), [&](const ir::Use& use) {
      if (use.node == nullptr) return true;
      if (backward_.contains(use.node)) return false;
      if (use.index == 0 && ops::is_view(*use.node)) {
        const auto& views = use.node->outputs;
        return std::any_of(views.begin(), views.end(), [&](const Value* view) {
          return view != nullptr && is_read_outside(*view, group);
        });
      }
      const auto reader = group_of_.find(use.node);
      return reader == group_of_.end() || reader->second != group;
    });
  }

  Graph& graph_;
  const SharedMemory memory_;
  const KnownSizes sizes_;
  const std::unordered_set<const Node*> backward_;
  std::unordered_map<const Node*, int> group_of_;  // of the forward half
  // Of the forward half: whether the region of the node computes in double.
  std::unordered_map<const Node*, bool> is_wide_;
  int num_forward_ = 0;
  std::vector<Host> hosts_;
  std::unordered_map<const Node*, int> host_of_;
  std::unordered_map<const Value*, std::vector<int>> hosts_reading_;  // whole tensors
  std::unordered_map<const Node*, int> order_;                        // positions in the graph
  std::unordered_map<const Node*, Candidate> possible_;  // by the node that makes the value
  std::unordered_map<const Value*, Candidate> candidates_;
  std::unordered_set<const Value*> crossing_;  // whole tensors
  std::unordered_set<const Value*> pinned_;    // those that cross whatever is recomputed
};

// Chooses the candidates to recompute, so that saving and recomputing together cost least.
std::unordered_set<const Value*> choose(const Candidates& candidates) {
  MinCut cut;
  // Each value has two nodes in the cut. If the first is on the sink's side, the value is
  // recomputed; if only the second is, the value crosses.
  std::unordered_map<const Value*, std::pair<int, int>> nodes;
  std::vector<const Value*> open, entered;
  const auto enter = [&](const Value* value) {
    const auto [found, is_new] = nodes.try_emplace(value);
    if (is_new) {
      const int made = cut.add_node(), crossed = cut.add_node();
      found->second = {made, crossed};
      cut.add_arc(made, crossed, candidates.cost_to_cross(*value));
      open.push_back(value);
      entered.push_back(value);
    }
    return found->second;
  };
  for (const Value* value : candidates.wanted()) {
    cut.add_arc(enter(value).second, MinCut::kSink, MinCut::kInfinite);
  }
  while (!open.empty()) {
    const Value* value = open.back();
    open.pop_back();
    const int made = nodes.at(value).first;
    const Candidate* candidate = candidates.find(value);
    cut.add_arc(MinCut::kSource, made,
                candidate == nullptr ? MinCut::kInfinite : candidates.cost_to_make(*candidate));
    if (candidate == nullptr) continue;
    for (const Value* input : candidate->maker.node->inputs) {
      if (input == nullptr || is_constant(*input)) continue;
      cut.add_arc(enter(input).second, made, MinCut::kInfinite);
    }
  }
  const std::vector<bool> is_made = cut.sink_side();
  std::unordered_set<const Value*> chosen;
  for (const Value* value : entered) {
    if (is_made[nodes.at(value).first]) chosen.insert(value);
  }
  return chosen;
}

// Writes copies of the chosen nodes in front of the regions that read their results.
class Rebuilder {
 public:
  Rebuilder(Graph& graph, const Candidates& candidates)
      : graph_(graph), candidates_(candidates), chosen_(choose(candidates)) {
    chains_.resize(candidates.hosts().size());
  }

  int run(PassContext& context) {
    int rewrites = 0;
    for (const Value* value : candidates_.wanted()) {
      if (!chosen_.contains(value) || !fits(*value)) continue;
      if (!context.may_rewrite()) break;
      for (int host : candidates_.find(value)->targets()) add_to_chain(value, chains_[host].makers);
      note_uses(*value);
      ++rewrites;
    }
    for (const Chain& chain : chains_) write(chain);
    erase_unread();
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
      if (use.node == nullptr || !candidates_.is_backward(use.node)) continue;
      const int reader = candidates_.host_of(use.node);
      if (reader >= 0 || store >= 0) chains_[reader >= 0 ? reader : store].uses.push_back(use);
    }
  }

  // Whether each region that is to recompute the value has room for it, beside what it recomputes
  // already.
  bool fits(const Value& value) const {
    const std::set<int> targets = candidates_.find(&value)->targets();
    return std::all_of(targets.begin(), targets.end(), [&](int host) {
      const RegionGroup& group = candidates_.hosts()[host].group;
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
    const ir::Use first = *std::min_element(
        chain.uses.begin(), chain.uses.end(), [this](const auto& a, const auto& b) {
          return candidates_.place(a.node) < candidates_.place(b.node);
        });
    ops::Writer write(graph_, first.node);
    std::unordered_map<const Value*, Value*> again;
    for (const auto& [place, maker] : chain.makers) {
      const Node& node = *maker.node;
      std::vector<Value*> inputs = node.inputs;
      for (Value*& input : inputs) {
        if (input == nullptr) continue;
        const auto found = again.find(input);
        input = found != again.end() ? found->second : copied(input);
      }
      again[node.outputs[0]] = write.again(node, std::move(inputs)).outputs[0];
    }
    for (const ir::Use& use : chain.uses) {
      ir::set_input(*use.node, use.index, again.at(use.node->inputs[use.index]));
    }
  }

  // What the backward half reads in place of a forward value: a copy, or the value itself.
  Value* copied(Value* value) {
    if (const auto found = copies_.find(value); found != copies_.end()) return found->second;
    const std::vector<ir::Use> uses = candidates_.copy_of(*value);
    Value* copy = value;
    if (!uses.empty()) {
      const ir::Use first =
          *std::min_element(uses.begin(), uses.end(), [this](const auto& a, const auto& b) {
            return candidates_.place(a.node) < candidates_.place(b.node);
          });
      ops::Writer write(graph_, first.node);
      copy = write.make("Identity", {value});
      for (const ir::Use& use : uses) ir::set_input(*use.node, use.index, copy);
    }
    copies_.emplace(value, copy);
    return copy;
  }

  // Erases the forward nodes whose results only the backward half has read.
  void erase_unread() {
    Makers makers;
    for (const Chain& chain : chains_) makers.insert(chain.makers.begin(), chain.makers.end());
    for (auto maker = makers.rbegin(); maker != makers.rend(); ++maker) {
      Node& node = *maker->second.node;
      if (node.outputs[0]->uses.empty()) ir::erase(graph_, node);
    }
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
