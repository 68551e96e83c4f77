#include "passes/rows/analysis.h"

#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/data_sizes.h"
#include "passes/halves.h"
#include "passes/rows/transfer.h"

#include <algorithm>

namespace torch_ort::passes::rows {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Value;

namespace {

constexpr Transfer kOthers;

}  // namespace

const Transfer& transfer_of(const Node& node) {
  const std::string op = kind_of(node);
  for (const auto family : {of_attention(), of_products(), of_regions(), of_views()}) {
    for (const Transfer& each : family) {
      if (each.op == op) return each;
    }
  }
  return kOthers;
}

const Transfer& transfer_of(Analysis& rows, const Node& node) {
  const Transfer& found = transfer_of(node);
  return found.is_for == nullptr || found.is_for(rows, node) ? found : kOthers;
}

Dim RowSpace::num_rows() const { return ops::times(sequences, length); }

Analysis::Analysis(ir::Graph& graph, RowSpace space, RowSources sources)
    : graph_(graph), space_(std::move(space)), sources_(sources) {}

// ---- the driver

void Analysis::run() {
  bool is_backward = false;
  for (Node& node : graph_.nodes) {
    if (node.is_erased()) continue;
    nodes_.push_back(&node);
    is_backward = is_backward || is_border(&node);
    if (is_backward) backward_.insert(&node);
  }
  for (Node* node : nodes_) transfer_of(*this, *node).find_nonzero(*this, *node);
  if (atoms_.empty()) return;
  if (!find_early()) {
    atoms_.clear();
    return;
  }
  for (Value* output : graph_.outputs) need(output, RowSet::all());
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    transfer_of(*this, **node).find_needed(*this, **node);
  }
}

// Finds the nodes that the conditions depend on. They must come before all nodes that get a list.
// False if they cannot.
bool Analysis::find_early() {
  const DataSizes sizes(graph_);
  std::vector<const Node*> open;
  for (const Atom& each : atoms_) {
    if (each.source != nullptr) open.push_back(each.source->producer);
  }
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !early_.insert(node).second) continue;
    if (!ops::is_pure(*node) || is_backward(*node)) return false;
    for (const Value* input : node->inputs) {
      if (input != nullptr) open.push_back(input->producer);
    }
    const std::vector<const Node*> givers = sizes.givers_for(*node);
    open.insert(open.end(), givers.begin(), givers.end());
  }
  return true;
}

// ---- where the rows are

Form Analysis::leading(const Value* value) const {
  if (!value->type.shape) return {};
  const Shape& shape = *value->type.shape;
  if (shape.size() >= 2 && shape[0] == space_.sequences && shape[1] == space_.length) {
    return {0, 1};
  }
  if (!shape.empty() && shape[0] == space_.num_rows()) return {0, 0};
  return {};
}

bool Analysis::is_all_rows(const Value* value) const {
  return value->type.shape && ir::numel(*value->type.shape) == space_.num_rows();
}

Facts& Analysis::of(const Value* value) {
  const auto [found, is_new] = facts_.try_emplace(value);
  if (is_new && value->producer == nullptr) found->second.form = leading(value);
  return found->second;
}

void Analysis::set(const Value* value, Form form, RowSet nonzero) {
  if (value == nullptr) return;
  Facts& facts = of(value);
  facts.form = form;
  facts.nonzero = nonzero;
}

void Analysis::need(const Value* value, const RowSet& rows) {
  if (value == nullptr) return;
  Facts& facts = of(value);
  if (!facts.form.is_there()) {
    facts.needed = RowSet::all();
    return;
  }
  // A reader may want more rows than the nonzero ones. Then the others are written as zeros.
  const bool wants_zeros = facts.form.is_leading() && !facts.nonzero.contains(rows) &&
                           value->producer != nullptr && !is_early(*value->producer);
  if (wants_zeros) zeroed_.insert(value);
  facts.needed = unite(facts.needed, wants_zeros ? facts.nonzero : rows);
}

RowSet Analysis::needed_of_outputs(const Node& node) {
  RowSet rows = RowSet::none();
  for (const Value* output : node.outputs) {
    if (output != nullptr) rows = unite(rows, of(output).needed);
  }
  return rows;
}

// ---- what nodes compute

Work Analysis::compute(const Node& node, Work work) {
  if (is_early(node)) return {};
  if (work.is_partial()) work_[&node] = work;
  return work;
}

Work Analysis::work(const Node& node) const {
  const auto found = work_.find(&node);
  return found == work_.end() ? Work() : found->second;
}

// ---- conditions

bool Analysis::may_tell(Atom::Kind kind) const {
  switch (kind) {
    case Atom::Kind::kLabels: return sources_.labels;
    case Atom::Kind::kMask: return sources_.padding;
    case Atom::Kind::kPlace: break;
  }
  return true;
}

RowSet Analysis::atom(const Atom& atom) {
  if (!may_tell(atom.kind)) return RowSet::all();
  auto found = std::find(atoms_.begin(), atoms_.end(), atom);
  if (found == atoms_.end()) {
    if (atoms_.size() == RowSet::kMostAtoms) return RowSet::all();
    if (atom.source != nullptr && backward_.contains(atom.source->producer)) return RowSet::all();
    found = atoms_.insert(found, atom);
  }
  return RowSet::atom(static_cast<size_t>(found - atoms_.begin()));
}

RowSet Analysis::set_of(const Node& rows) {
  if (ir::int_attr(rows.attrs, "is_all", 0) != 0) return RowSet::all();
  RowSet set = RowSet::none();
  for (const Dim& place : ir::ints_attr(rows.attrs, "places", {})) {
    set = unite(set, atom({.kind = Atom::Kind::kPlace, .place = place.constant()}));
  }
  const auto kinds = ir::strings_attr(rows.attrs, "kinds", {});
  const Shape ignored = ir::ints_attr(rows.attrs, "ignored", {});
  const Shape causal = ir::ints_attr(rows.attrs, "is_causal", {});
  for (size_t i = 0; i < kinds.size(); ++i) {
    set = unite(set, atom({.kind = kinds[i] == "mask" ? Atom::Kind::kMask : Atom::Kind::kLabels,
                           .source = rows.inputs.at(i),
                           .ignored = ignored.at(i).constant(),
                           .is_causal = causal.at(i).constant() != 0}));
  }
  return ir::int_attr(rows.attrs, "is_closed", 0) != 0 ? set.closed() : set;
}

}  // namespace torch_ort::passes::rows
