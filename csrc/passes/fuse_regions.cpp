// Nodes of the small language of ops/fusion.h -> torch_ort.Region nodes that have these nodes in
// their bodies. A region runs in one pass over memory: values between its nodes stay in the
// first-level cache.
//
// Nodes are fused along the values that they share, if they agree on rows and columns
// (region/spaces.h), are in the same half, and no path leaves the group and comes back.
//
// It decides by symbols, never by the sizes of the captured call. A region computes in float32, or
// in float64 if it reads a double or an integer, whatever the dtypes of its operands, and rounds
// only its outputs, unless `emulate_eager_casts` asks for all values.
//
// Rows that are looked up in a table of embeddings are read in place, so that they are written to
// memory only if other steps read them. Ids are read as integers, and raise what eager PyTorch
// raises. The gradient of a table stays a step of its own, since most of its time is spent on
// clearing the table (benchmarks/results/decisions.md).

#include "base/error.h"
#include "ir/edit.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/data_sizes.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "passes/merged_order.h"
#include "passes/region_groups.h"
#include "region/codegen.h"
#include "region/contract.h"
#include "region/spaces.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <set>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Value;
using Kind = ops::FusedForm::Kind;
using region::Member;
using region::Space;

// The nodes of a graph by position, and which of them must come before others.
struct Order {
  std::vector<Node*> nodes;
  std::unordered_map<const Node*, int> positions;
  std::vector<Arc> arcs;  // between positions: readers of results and sizes, and side effects
  int border = 0;         // position of the YieldOp, or the end if there is none

  explicit Order(Graph& graph, const SharedMemory& memory) {
    for (Node& node : graph.nodes) {
      if (node.is_erased()) continue;
      positions[&node] = static_cast<int>(nodes.size());
      nodes.push_back(&node);
    }
    border = static_cast<int>(nodes.size());
    const auto captured = captured_values(graph);
    const DataSizes sizes(graph);
    int last_effect = -1;
    std::unordered_map<const Value*, std::vector<int>> readers;  // by root of written memory
    std::unordered_map<const Value*, int> last_writer;
    for (int at = 0; at < static_cast<int>(nodes.size()); ++at) {
      const Node& node = *nodes[at];
      add_readers(at);
      for (const Node* giver : sizes.givers_for(node)) arcs.push_back({position(giver), at});
      if (is_border(&node)) border = at;
      const bool is_effect = !ops::is_pure(node);
      if (is_effect) {
        if (last_effect >= 0) arcs.push_back({last_effect, at});
        last_effect = at;
      }
      const auto touch = [&](const Value* value) {
        if (value == nullptr || !memory.is_written(value)) return;
        const Value* root = SharedMemory::root(value);
        if (const auto writer = last_writer.find(root); writer != last_writer.end()) {
          arcs.push_back({writer->second, at});
        }
        if (is_effect) {
          for (int reader : readers[root]) arcs.push_back({reader, at});
          last_writer[root] = at;
        }
        readers[root].push_back(at);
      };
      for (const Value* value : node.inputs) touch(value);
      const auto [first, last] = captured.equal_range(&node);
      for (auto each = first; each != last; ++each) touch(each->second);
    }
  }

  // What the bodies of a node refer to by name, which is not among its inputs.
  static std::unordered_multimap<const Node*, const Value*> captured_values(const Graph& graph) {
    std::unordered_multimap<const Node*, const Value*> captured;
    for (const Value& value : graph.values) {
      for (const ir::Use& use : value.uses) {
        if (use.node != nullptr && use.index == ir::kCaptured) captured.emplace(use.node, &value);
      }
    }
    return captured;
  }

  int position(const Node* node) const { return positions.at(node); }

  void add_readers(int at) {
    for (const Value* value : nodes[at]->outputs) {
      if (value == nullptr) continue;
      for (const ir::Use& use : value->uses) {
        if (use.node != nullptr) arcs.push_back({at, position(use.node)});
      }
    }
  }
};

struct Group {
  std::vector<int> members;  // positions, sorted
  Dim elements;
  std::vector<Dim> columns;  // that all members allow; the first is preferred
  int segment = -1;          // of all members (Node::segment)
};

class Grouping {
 public:
  Grouping(Graph& graph, const SharedMemory& memory)
      : memory_(memory),
        order_(graph, memory),
        merged_order_(static_cast<int>(order_.nodes.size()), order_.arcs),
        sizes_(graph),
        device_(device_of_regions(graph)) {
    find_fusible();
    join();
    for (Group& group : groups_) trim(group);
    std::erase_if(groups_, [this](const Group& group) { return !is_worth_it(group); });
  }

  const Order& order() const { return order_; }
  const std::vector<Group>& groups() const { return groups_; }

  std::vector<Member> nodes_of(const std::vector<int>& members) const {
    std::vector<Member> nodes;
    for (int at : members) nodes.push_back({order_.nodes[at], forms_[at]});
    return nodes;
  }

 private:
  // ---- fusible nodes

  void find_fusible() {
    forms_.resize(order_.nodes.size());
    group_of_.assign(order_.nodes.size(), -1);
    for (int at = 0; at < static_cast<int>(order_.nodes.size()); ++at) {
      const Node& node = *order_.nodes[at];
      const auto is_read = [](const Value* value) {
        return value != nullptr && !value->uses.empty();
      };
      if (!ops::is_pure(node) || !std::any_of(node.outputs.begin(), node.outputs.end(), is_read)) {
        continue;
      }
      forms_[at] = ops::fused_form(node);
      if (forms_[at].kind == Kind::kNone || !is_in_reach(node)) continue;
      const Member each{order_.nodes[at], forms_[at]};
      Group group{{at}, region::num_elements(each), region::possible_columns(each)};
      if (group.elements == Dim(0)) continue;  // rows and columns cannot be told apart
      keep_fitting(group);
      if (group.columns.empty()) continue;
      group.segment = node.segment;
      group_of_[at] = static_cast<int>(groups_.size());
      groups_.push_back(std::move(group));
    }
  }

  // Whether the code generator takes the values of the node, their sizes are known, and nobody
  // writes to the memory of its result. Operands may be written to: the arcs of Order keep their
  // readers before or after that. Constants become part of the kernel; other values have to be on
  // its device.
  bool is_in_reach(const Node& node) const {
    if (!(node.outputs[0]->type.device == device_)) return false;
    const auto holds = [&](const Value* value) {
      if (value == nullptr) return true;
      const bool is_there = value->type.device == device_ || value->data != nullptr;
      return is_there && region::takes(value) && sizes_.are_known(*value);
    };
    const auto is_written = [&](const Value* value) {
      return value != nullptr && memory_.is_written(value);
    };
    return std::all_of(node.inputs.begin(), node.inputs.end(), holds) &&
           std::all_of(node.outputs.begin(), node.outputs.end(), holds) &&
           std::none_of(node.outputs.begin(), node.outputs.end(), is_written);
  }

  // Keeps the numbers of columns under which all members fit together.
  void keep_fitting(Group& group) const {
    const std::vector<Member> nodes = nodes_of(group.members);
    using Cost = std::pair<int, int>;
    std::vector<std::pair<Cost, Dim>> fitting;
    for (const Dim& columns : group.columns) {
      const std::optional<region::Spaces> spaces =
          region::find_spaces(nodes, group.elements, columns);
      if (!spaces || spaces->operands.size() > kMaxInputs) continue;
      // Operands that are broadcast element by element are the slowest to read, then those whose
      // rows are repeated.
      Cost cost;
      for (const region::Operand& input : spaces->operands) {
        cost.first += input.splits_columns ? 1 : 0;
        cost.second += input.shape.empty() ? 0 : 1;
      }
      fitting.emplace_back(cost, columns);
    }
    // Among equals the longest rows come first, since row values are then read least often.
    std::reverse(fitting.begin(), fitting.end());
    std::stable_sort(fitting.begin(), fitting.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    group.columns.clear();
    for (auto& [cost, columns] : fitting) group.columns.push_back(std::move(columns));
  }

  // ---- joining

  void join() {
    for (int at = 0; at < static_cast<int>(order_.nodes.size()); ++at) {
      if (group_of_[at] < 0) continue;
      for (const Value* value : order_.nodes[at]->inputs) {
        if (value == nullptr || value->producer == nullptr) continue;
        const int producer = order_.position(value->producer);
        if (!belongs_to_readers(producer, at)) try_join(producer, at);
      }
    }
    // Readers of one value are joined, so that it is read once.
    for (int at = 0; at < static_cast<int>(order_.nodes.size()); ++at) {
      for (const Value* value : order_.nodes[at]->outputs) {
        if (value != nullptr) join_readers(*value);
      }
    }
    std::erase_if(groups_, [](const Group& group) { return group.members.empty(); });
  }

  // Whether a node that reads a view of an input had better be joined with its own readers: if none
  // of them can be in the group of the other readers of the view, that group would write the node's
  // result to memory for them.
  bool belongs_to_readers(int view, int at) {
    const Node& node = *order_.nodes[view];
    if (forms_[view].kind != Kind::kPass || !ops::is_view(node)) return false;
    const Node* viewed = node.inputs[0]->producer;
    if (viewed != nullptr && group_of_[order_.position(viewed)] >= 0) return false;
    const auto& uses = order_.nodes[at]->outputs[0]->uses;
    return std::all_of(uses.begin(), uses.end(), [&](const ir::Use& use) {
      if (use.node == nullptr || use.index < 0) return false;
      const int reader = order_.position(use.node);
      if (group_of_[reader] == group_of_[view]) return false;
      const bool joins_others =
          !merged_order_.has_path(view, reader, at) && joined_groups(view, reader);
      return !joins_others && joined_groups(at, reader);
    });
  }

  void join_readers(const Value& value) {
    int first = -1;
    for (const ir::Use& use : value.uses) {
      if (use.node == nullptr || use.index < 0) continue;
      const int at = order_.position(use.node);
      if (group_of_[at] < 0) continue;
      if (first >= 0) try_join(std::min(first, at), std::max(first, at));
      first = at;
    }
  }

  void try_join(int a, int b) {
    std::optional<Group> joined = joined_groups(a, b);
    if (!joined || !merged_order_.merge(a, b)) return;
    const int kept = group_of_[a], gone = group_of_[b];
    for (int at : groups_[gone].members) group_of_[at] = kept;
    groups_[gone] = {};
    groups_[kept] = std::move(*joined);
  }

  // The groups of two nodes together, if they are two that fit, whatever lies between them.
  std::optional<Group> joined_groups(int a, int b) const {
    if (group_of_[a] < 0 || group_of_[b] < 0 || group_of_[a] == group_of_[b]) return std::nullopt;
    if ((a < order_.border) != (b < order_.border)) return std::nullopt;
    const Group &first = groups_[group_of_[a]], &second = groups_[group_of_[b]];
    if (first.members.size() + second.members.size() > kMaxNodes) return std::nullopt;
    if (first.segment != second.segment) return std::nullopt;
    return fit(first, second);
  }

  std::optional<Group> fit(const Group& a, const Group& b) const {
    if (copies_integers(a) != copies_integers(b)) return std::nullopt;
    Group joined;
    joined.segment = a.segment;
    std::merge(a.members.begin(), a.members.end(), b.members.begin(), b.members.end(),
               std::back_inserter(joined.members));
    if (a.elements == b.elements) {
      joined.elements = a.elements;
      for (const Dim& columns : a.columns) {
        const auto& others = b.columns;
        if (std::find(others.begin(), others.end(), columns) != others.end()) {
          joined.columns.push_back(columns);
        }
      }
    } else if (!fit_rows(a, b, joined) && !fit_rows(b, a, joined)) {
      return std::nullopt;
    }
    keep_fitting(joined);
    return joined.columns.empty() ? std::nullopt : std::optional(std::move(joined));
  }

  // Whether `rows` has one element for each row of `all`. Then `joined` gets the columns that fit.
  static bool fit_rows(const Group& rows, const Group& all, Group& joined) {
    for (const Dim& columns : all.columns) {
      if (ops::times(rows.elements, columns) == all.elements) joined.columns.push_back(columns);
    }
    joined.elements = all.elements;
    return !joined.columns.empty();
  }

  // Whether the group only passes integers on, such as class labels. It is not fused with floats,
  // since a region that reads integers computes in float64, which is slower.
  bool copies_integers(const Group& group) const {
    return std::all_of(group.members.begin(), group.members.end(), [this](int at) {
      const Node& node = *order_.nodes[at];
      const ir::DType dtype = node.outputs[0]->type.dtype;
      return forms_[at].kind == Kind::kPass && node.inputs[0]->type.dtype == dtype &&
             (dtype == ir::DType::kInt64 || dtype == ir::DType::kInt32);
    });
  }

  // ---- groups that become regions

  bool is_member(const Group& group, const Node* node) const {
    return node != nullptr &&
           std::binary_search(group.members.begin(), group.members.end(), order_.position(node));
  }

  // Removes views at the edge. Outside they cost nothing, and the planner sees which values share
  // memory.
  void trim(Group& group) {
    for (bool changed = true; changed;) {
      const auto is_edge = [&](int at) {
        const Node& node = *order_.nodes[at];
        if (forms_[at].kind != Kind::kPass || !ops::is_view(node)) return false;
        const auto& uses = node.outputs[0]->uses;
        const bool is_read = std::any_of(uses.begin(), uses.end(), [&](const ir::Use& use) {
          return is_member(group, use.node);
        });
        return !is_read || !is_member(group, node.inputs[0]->producer);
      };
      changed = std::erase_if(group.members, is_edge) > 0;
    }
    if (group.members.empty()) return;
    keep_fitting(group);
  }

  // A single operator is as fast by itself, unless it is a costly one. Random masks are drawn only
  // in regions.
  bool is_worth_it(const Group& group) const {
    if (group.columns.empty()) return false;
    const auto is_enough = [this](int at) {
      const ops::FusedForm& form = forms_[at];
      return form.kind == Kind::kRandom ||
             (form.kind == Kind::kPointwise && ops::word(form.op).cost == ops::Cost::kCostly);
    };
    if (std::any_of(group.members.begin(), group.members.end(), is_enough)) return true;
    const auto works = [this](int at) {
      return forms_[at].kind != Kind::kPass || ir::is(order_.nodes[at], "Cast");
    };
    return std::count_if(group.members.begin(), group.members.end(), works) > 1;
  }

  const SharedMemory& memory_;
  Order order_;
  MergedOrder merged_order_;
  KnownSizes sizes_;
  const ir::Device device_;
  std::vector<ops::FusedForm> forms_;  // by position
  std::vector<int> group_of_;          // by position
  std::vector<Group> groups_;
};

// Moves the nodes of a group into the body of a new node.
class RegionMaker {
 public:
  RegionMaker(Graph& graph, const Grouping& grouping, const Group& group)
      : graph_(graph),
        nodes_(grouping.nodes_of(group.members)),
        spaces_(*region::find_spaces(nodes_, group.elements, group.columns.front())),
        body_(std::make_shared<Graph>()) {
    for (const Member& each : nodes_) members_.insert(each.node);
  }

  // Returns the new node, which comes before the last member, and the views of its results.
  std::vector<Node*> run() {
    body_->name = graph_.name + "_region";
    add_inputs();
    for (const Member& each : nodes_) copy_node(each);
    find_outputs();
    return replace();
  }

 private:
  std::string inner_name(const Value& value) const {
    std::string name = value.name + "_in";
    while (graph_.names.contains(name) || body_->names.contains(name)) name += '_';
    return name;
  }

  void add_inputs() {
    for (const region::Operand& input : spaces_.operands) {
      Value* value = input.value;
      if (ops::known_double(value) && input.space == Space::kScalar) {
        inputs_.push_back(&ir::add_initializer(*body_, inner_name(*value), value->type,
                                               ops::constant_data(*value)));
        continue;
      }
      if (ir::is(value->producer, "SizeRatio", ir::kTorchOrtDomain)) {
        inputs_.push_back(inner(*value));
        continue;
      }
      inputs_.push_back(&ir::add_input(*body_, inner_name(*value), value->type));
      outer_inputs_.push_back(value);
      outer_spaces_.push_back(input.space);
    }
  }

  void copy_node(const Member& each) {
    const Node& node = *each.node;
    const size_t index = static_cast<size_t>(&each - nodes_.data());
    std::vector<Value*> inputs;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const int input = spaces_.operand_of[index][i];
      if (input >= 0) {
        inputs.push_back(inputs_[input]);
      } else {
        inputs.push_back(node.inputs[i] == nullptr ? nullptr : inner(*node.inputs[i]));
      }
    }
    Value& output = ir::add_value(*body_, inner_name(*node.outputs[0]), node.outputs[0]->type);
    ir::append_producer(*body_, node.op, std::move(inputs), {&output}, node.attrs, node.name)
        .origin = node.origin;
    copies_[node.outputs[0]] = &output;
  }

  // The value in the body for a member's result, or a copy of axes, a shape or a ratio of sizes.
  Value* inner(const Value& value) {
    if (const auto found = copies_.find(&value); found != copies_.end()) return found->second;
    Value* copy = nullptr;
    if (value.producer == nullptr) {
      copy = &ir::add_initializer(*body_, inner_name(value), value.type, ops::constant_data(value));
    } else {
      const Node& dims = *value.producer;
      ORT_CHECK(dims.inputs.empty(), "fuse_regions: '", value.name, "' comes from outside");
      Value& output = ir::add_value(*body_, inner_name(value), value.type);
      ir::append_producer(*body_, dims.op, {}, {&output}, dims.attrs, dims.name);
      copy = &output;
    }
    copies_[&value] = copy;
    return copy;
  }

  // Finds the values that nodes outside read. Views among them are made outside, from results of
  // the region.
  void find_outputs() {
    for (const Member& each : nodes_) {
      Value* value = each.node->outputs[0];
      const bool is_read = std::any_of(value->uses.begin(), value->uses.end(), [&](ir::Use use) {
        return use.node == nullptr || !members_.contains(use.node);
      });
      if (!is_read) continue;
      if (is_view(each)) {
        views_.push_back(each.node);
        need_viewed(*each.node);
      } else {
        need(value);
      }
    }
    // Full values come first, because the first output may be placed in the memory of an input.
    std::stable_sort(outputs_.begin(), outputs_.end(), [this](const Value* a, const Value* b) {
      return spaces_.made.at(a) == Space::kFull && spaces_.made.at(b) != Space::kFull;
    });
    for (Value* value : outputs_) ir::add_output(*body_, *copies_.at(value));
  }

  static bool is_view(const Member& each) {
    return each.form.kind == Kind::kPass && ops::is_view(*each.node);
  }

  void need(Value* value) {
    if (std::find(outputs_.begin(), outputs_.end(), value) == outputs_.end()) {
      outputs_.push_back(value);
    }
  }

  void need_viewed(const Node& view) {
    Value* base = view.inputs[0];
    for (const Member& each : nodes_) {
      if (each.node != base->producer) continue;
      if (!is_view(each)) return need(base);
      if (std::find(views_.begin(), views_.end(), each.node) == views_.end()) {
        views_.insert(std::find(views_.begin(), views_.end(), &view), each.node);
      }
      return need_viewed(*each.node);
    }
    // The base is an input of the region, so the view needs no result of it.
  }

  std::vector<Node*> replace() {
    Node& last = *nodes_.back().node;
    std::vector<ir::Type> types;
    for (const Value* value : outputs_) types.push_back(value->type);
    ir::Attrs attrs;
    region::write({body_, spaces_.rows, spaces_.columns, outer_spaces_}, attrs);
    ops::Writer write(graph_, &last);
    Node& region = write.add_named(region_name(), {ir::kTorchOrtDomain, "Region"}, outer_inputs_,
                                   types, std::move(attrs));
    std::vector<Node*> made = {&region};
    std::unordered_map<const Value*, Value*> now;
    for (size_t i = 0; i < outputs_.size(); ++i) now[outputs_[i]] = region.outputs[i];
    for (Node* view : views_) {
      std::vector<Value*> inputs = view->inputs;
      if (const auto found = now.find(inputs[0]); found != now.end()) inputs[0] = found->second;
      Node& again = write.copy(*view, std::move(inputs), {view->outputs[0]->type});
      now[view->outputs[0]] = again.outputs[0];
      made.push_back(&again);
    }
    for (Value* old : outputs_) ir::replace_uses(*old, *now.at(old), graph_);
    for (const Node* view : views_) {
      Value* old = view->outputs[0];
      ir::replace_uses(*old, *now.at(old), graph_);
    }
    for (auto each = nodes_.rbegin(); each != nodes_.rend(); ++each) {
      ir::erase(graph_, *each->node);
    }
    return made;
  }

  // From the names of the first and the last node.
  std::string region_name() const {
    return concat(nodes_.front().node->name, "_to_", nodes_.back().node->name);
  }

  Graph& graph_;
  std::vector<Member> nodes_;
  region::Spaces spaces_;
  std::shared_ptr<Graph> body_;
  std::unordered_set<const Node*> members_;
  std::vector<Value*> inputs_;        // in the body, by Spaces::operands
  std::vector<Value*> outer_inputs_;  // of the region node
  std::vector<Space> outer_spaces_;
  std::unordered_map<const Value*, Value*> copies_;
  std::vector<Value*> outputs_;
  std::vector<Node*> views_;
};

// Sorts groups and single nodes so that all come after what they read, and otherwise keeps the
// given order. A group has the position of its last member.
std::vector<int> sorted_units(const Order& order, const std::vector<Group>& groups,
                              std::vector<int>& unit_of) {
  const int count = static_cast<int>(order.nodes.size());
  unit_of.resize(count);
  for (int at = 0; at < count; ++at) unit_of[at] = at;
  for (const Group& group : groups) {
    for (int at : group.members) unit_of[at] = group.members.back();
  }
  std::vector<std::set<int>> successors(count);
  std::vector<int> waiting(count, 0);
  for (const Arc& arc : order.arcs) {
    const int from = unit_of[arc.from], to = unit_of[arc.to];
    if (from != to && successors[from].insert(to).second) ++waiting[to];
  }
  std::priority_queue<int, std::vector<int>, std::greater<>> ready;
  int units = 0;
  for (int at = 0; at < count; ++at) {
    if (unit_of[at] != at) continue;
    ++units;
    if (waiting[at] == 0) ready.push(at);
  }
  std::vector<int> sorted;
  while (!ready.empty()) {
    const int unit = ready.top();
    ready.pop();
    sorted.push_back(unit);
    for (int next : successors[unit]) {
      if (--waiting[next] == 0) ready.push(next);
    }
  }
  ORT_CHECK(static_cast<int>(sorted.size()) == units,
            "fuse_regions: ", units - static_cast<int>(sorted.size()), " of ", units,
            " groups depend on each other");
  return sorted;
}

}  // namespace

// The same device as device_of() in run/compiled_graph.cpp.
ir::Device device_of_regions(const Graph& graph) {
  for (const Value& value : graph.values) {
    if (!ir::is_host(value.type.device)) return value.type.device;
  }
  return {};
}

std::vector<RegionGroup> region_groups(Graph& graph) {
  const SharedMemory memory(graph);
  const Grouping grouping(graph, memory);
  std::vector<RegionGroup> groups;
  for (const Group& group : grouping.groups()) {
    groups.push_back({grouping.nodes_of(group.members), group.elements, group.columns.front()});
  }
  return groups;
}

int fuse_regions(Graph& graph, PassContext& context) {
  const SharedMemory memory(graph);
  const Grouping grouping(graph, memory);
  std::vector<Group> groups;
  for (const Group& group : grouping.groups()) {
    if (!context.may_rewrite()) break;
    groups.push_back(group);
  }
  if (groups.empty()) return 0;

  const Order& order = grouping.order();
  std::vector<int> unit_of;
  const std::vector<int> sorted = sorted_units(order, groups, unit_of);
  std::unordered_map<int, std::vector<Node*>> made;  // by unit
  for (const Group& group : groups) {
    made[group.members.back()] = RegionMaker(graph, grouping, group).run();
  }
  std::vector<Node*> nodes;
  for (int unit : sorted) {
    if (const auto found = made.find(unit); found != made.end()) {
      nodes.insert(nodes.end(), found->second.begin(), found->second.end());
    } else {
      nodes.push_back(order.nodes[unit]);
    }
  }
  ir::reorder(graph, nodes);
  return static_cast<int>(groups.size());
}

}  // namespace torch_ort::passes
