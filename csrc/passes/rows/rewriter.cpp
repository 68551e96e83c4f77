#include "passes/rows/rewriter.h"

#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/border/budget.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/rows/transfer.h"

#include <algorithm>
#include <iterator>

namespace torch_ort::passes::rows {

using ir::Node;
using ir::Shape;
using ir::Value;

namespace {

bool is_ours(const Node& node, std::string_view name) {
  return ir::is(&node, name, ir::kTorchOrtDomain);
}

}  // namespace

int Rewriter::run(PassContext& context) {
  const std::vector<Node*>& nodes = rows_.nodes();
  const auto has_work = [this](const Node* node) { return rows_.work(*node).is_partial(); };
  // All of this is one rewrite, because the rows that one node leaves out must be left out by all
  // its readers.
  const auto first = std::find_if(nodes.begin(), nodes.end(), has_work);
  if (first == nodes.end() || !context.may_rewrite()) return 0;
  device_ = (*first)->outputs[0]->type.device;
  move_early();
  for (Node* node : nodes) {
    for (Value* output : node->outputs) {
      if (output != nullptr && rows_.is_zeroed(output)) write_zeros(*node, *output);
    }
  }
  for (Node* node : nodes) {
    if (has_work(node)) transfer_of(*node).give_lists(*this, *node, rows_.work(*node));
  }
  if (context.budget_report != nullptr) report_lists(context.budget, *context.budget_report);
  return 1;
}

int Rewriter::run_again() {
  const std::vector<Node*>& nodes = rows_.nodes();
  const auto is_free = [this](const Node* node) { return rows_.is_backward(*node); };
  const auto suffices = [&](const Node* node) { return is_free(node) || has_enough(*node); };
  if (!std::all_of(nodes.begin(), nodes.end(), suffices)) return 0;
  device_ = nodes.front()->outputs[0]->type.device;
  move_early();
  for (Node* node : nodes) {
    if (is_ours(*node, "Rows")) lists_.try_emplace(rows_.set_of(*node), node->outputs[0]);
  }
  for (Node* node : nodes) {
    if (!is_free(node) && ops::row_list_inputs(*node).empty()) continue;
    for (Value* output : node->outputs) {
      if (output == nullptr || !rows_.is_zeroed(output)) continue;
      if (!is_ours(*node, "ZeroRows")) {
        write_zeros(*node, *output);
      } else if (is_free(node)) {
        ir::set_input(*node, 1, list(rows_.of(output).nonzero));
      }
    }
  }
  for (Node* node : nodes) {
    if (!is_free(node) || is_ours(*node, "ZeroRows")) continue;
    const std::vector<int> slots = ops::row_list_inputs(*node);
    const Work work = rows_.work(*node);
    if (!slots.empty()) {
      ir::set_input(*node, slots[0], list(work.rows));
      if (slots.size() > 1) ir::set_input(*node, slots[1], list(work.keys));
    } else if (work.is_partial()) {
      transfer_of(*node).give_lists(*this, *node, work);
    }
  }
  // Lists that nobody reads any more stay: a backward half for other gradients may need them.
  return 1;
}

// Whether the rows that the node computes are all that its readers want.
bool Rewriter::has_enough(const Node& node) {
  const std::vector<int> slots = ops::row_list_inputs(node);
  if (slots.empty() || is_ours(node, "ZeroRows")) return true;
  const Work work = rows_.work(node);
  const auto lists = [&](int slot) { return rows_.set_of(*node.inputs[slot]->producer); };
  return lists(slots[0]).contains(work.rows) &&
         (slots.size() < 2 || lists(slots[1]).contains(work.keys));
}

// Moves the nodes that the conditions depend on to the front; the lists are written after them.
void Rewriter::move_early() {
  std::vector<Node*> order = rows_.nodes();
  const auto rest = std::stable_partition(order.begin(), order.end(),
                                          [this](Node* node) { return rows_.is_early(*node); });
  if (rest != order.end()) first_ = *rest;
  ir::reorder(graph_, order);
}

// Writes zeros for all readers of the value. Those that read only nonzero rows are not affected.
void Rewriter::write_zeros(Node& node, Value& value) {
  const auto next = std::next(node.position);
  ops::Writer write(graph_, next == graph_.nodes.end() ? nullptr : &*next);
  Value* zeroed = write.make_ours("ZeroRows", {&value, list(rows_.of(&value).nonzero)}, value.type);
  ir::replace_uses(value, *zeroed, graph_);
  ir::set_input(*zeroed->producer, 0, &value);
}

void Rewriter::replace(Node& node, std::string op, std::vector<Value*> inputs, ir::Attrs attrs) {
  Value* result = node.outputs[0];
  const Node& made = ops::Writer(graph_, &node)
                         .add_named(node.name, {ir::kTorchOrtDomain, std::move(op)},
                                    std::move(inputs), {result->type}, std::move(attrs));
  ir::replace_uses(*result, *made.outputs[0], graph_);
  ir::erase(graph_, node);
}

// Lists that the backward half reads are held beside the values that the budget has counted.
void Rewriter::report_lists(const Budget* budget, BudgetReport& report) const {
  const std::unordered_set<const Node*> backward = backward_nodes(graph_);
  for (const auto& [rows, list] : lists_) {
    const bool crosses = std::any_of(list->uses.begin(), list->uses.end(), [&](const ir::Use& use) {
      return backward.contains(use.node);
    });
    if (!crosses || backward.contains(list->producer)) continue;
    report.list_bytes += hinted_size(graph_, ir::numel(*list->type.shape)).value_or(0) *
                         ir::size_bytes(list->type.dtype);
  }
  for (int64_t* bytes :
       {&report.dense_bytes, &report.dense_held_bytes, &report.peak_bytes, &report.held_bytes}) {
    *bytes += report.list_bytes;
  }
  report.allowed_bytes = budget != nullptr ? budget->bytes(report.dense_bytes)
                                           : report.allowed_bytes + report.list_bytes;
}

Value* Rewriter::list(const RowSet& rows) {
  const auto [found, is_new] = lists_.try_emplace(rows, nullptr);
  if (is_new) found->second = make_list(rows);
  return found->second;
}

Value* Rewriter::make_list(const RowSet& rows) {
  std::vector<Value*> sources;
  Shape ignored, causal, places;
  std::vector<std::string> kinds;
  for (size_t i = 0; i < rows_.atoms().size(); ++i) {
    if (!rows.has_atom(i)) continue;
    const Atom& atom = rows_.atoms()[i];
    if (atom.kind == Atom::Kind::kPlace) {
      places.emplace_back(atom.place);
      continue;
    }
    sources.push_back(atom.source);
    kinds.emplace_back(atom.kind == Atom::Kind::kLabels ? "labels" : "mask");
    ignored.emplace_back(atom.ignored);
    causal.emplace_back(int64_t{atom.is_causal ? 1 : 0});
  }
  ir::Attrs attrs;
  if (rows.is_closed()) attrs["is_closed"] = int64_t{1};
  if (rows.is_all()) attrs["is_all"] = int64_t{1};
  if (!places.empty()) attrs["places"] = places;
  if (!kinds.empty()) {
    attrs["kinds"] = kinds;
    attrs["ignored"] = ignored;
    attrs["is_causal"] = causal;
  }
  const ir::Type type{.dtype = ir::DType::kInt64,
                      .shape = Shape{space().sequences, ops::plus(space().length, 1)},
                      .device = device_};
  ops::Writer write(graph_, first_);
  return write.make_ours("Rows", std::move(sources), type, std::move(attrs));
}

}  // namespace torch_ort::passes::rows
