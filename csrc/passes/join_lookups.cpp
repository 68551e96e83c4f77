// Concat(Gather(table, ids), Gather(table, ids), x, ...) -> torch_ort.Lookups
// EmbeddingGrad(part of a gradient, ids), ...            -> one torch_ort.EmbeddingGrads
//
// A recommender looks up a row in each of its tables, puts the rows side by side, and adds rows of
// the gradient of all of them to each table. A step for each table costs more than its rows. The
// gradients are joined if they read one tensor, so that none of them waits for another.
//
// Declines if something else reads a looked-up row or the gradient of a table, if a table or its
// ids are written to, and where few tables are looked up: regions read those in place.

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "passes/unread.h"
#include "region/codegen.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

// With fewer tables, steps of their own take as long (benchmarks/results/decisions.md).
constexpr int64_t kFewest = 4;

bool is_read_by(const Value& value, const Node& reader) {
  return std::all_of(value.uses.begin(), value.uses.end(),
                     [&](const ir::Use& use) { return use.node == &reader; });
}

// Rows of a table.
struct Lookup {
  Value *table, *ids;
  std::vector<Node*> nodes;  // what reads them, and how they come to the Concat
};

class Finder {
 public:
  explicit Finder(const Graph& graph) : sizes_(graph), memory_(graph) {}

  // The rows of a table that a Concat reads; `rows` are the dims before its axis.
  std::optional<Lookup> lookup(Value* value, const Node& reader, const Shape& rows) const {
    Lookup found;
    const Node* by = &reader;
    const DType dtype = value->type.dtype;
    for (Node* maker = value->producer; maker != nullptr; maker = value->producer) {
      if (!is_read_by(*value, *by) || memory_.leaves(value)) return std::nullopt;
      found.nodes.push_back(maker);
      by = maker;
      if (ir::is(maker, "Gather")) return is_lookup(*maker, rows, found);
      if (!ops::work_of(*maker).keeps_elements) return std::nullopt;
      value = maker->inputs[0];
      if (value->type.dtype != dtype) return std::nullopt;
    }
    return std::nullopt;
  }

  bool can_be_part(const Value* value, size_t rank) const {
    return value != nullptr && value->type.is_known() && value->type.shape->size() == rank &&
           sizes_.are_known(*value);
  }

  bool is_gradient(const Node& node) const {
    if (node.is_erased() || !ir::is(&node, "EmbeddingGrad", ir::kTorchOrtDomain)) return false;
    const Value* table = node.outputs[0];
    const bool is_whole = node.inputs.size() == 2 && node.outputs.size() == 1;
    return is_whole && region::has_kernel(table, "EmbeddingGrads") &&
           std::all_of(table->uses.begin(), table->uses.end(),
                       [](const ir::Use& use) { return use.node == nullptr; });
  }

 private:
  std::optional<Lookup> is_lookup(const Node& gather, const Shape& rows, Lookup found) const {
    found.table = gather.inputs[0];
    found.ids = gather.inputs[1];
    const ir::Type &table = found.table->type, &ids = found.ids->type;
    const bool is_known = table.is_known() && ids.is_known() && !table.shape->empty();
    if (!is_known || ids.dtype != DType::kInt64 || *ids.shape != rows) return std::nullopt;
    const auto rank = static_cast<int64_t>(table.shape->size());
    if (ops::wrap_axis(gather, ir::int_attr(gather.attrs, "axis", 0), rank) != 0) return {};
    for (const Value* value : {found.table, found.ids}) {
      if (memory_.is_written(value) || !sizes_.are_known(*value)) return std::nullopt;
    }
    return found;
  }

  const KnownSizes sizes_;
  const SharedMemory memory_;
};

// Writes Lookups in place of a Concat. Returns false if it does not look up enough tables.
bool join(Graph& graph, Node& concat, const Finder& finder, PassContext& context) {
  const Value* result = concat.outputs[0];
  if (result == nullptr || !result->type.is_known() || result->type.strides) return false;
  if (!region::has_kernel(result, "Lookups")) return false;
  const size_t rank = result->type.shape->size();
  const int64_t axis =
      ops::wrap_axis(concat, ir::int_attr(concat.attrs, "axis", 0), static_cast<int64_t>(rank));
  const Shape rows(result->type.shape->begin(), result->type.shape->begin() + axis);
  std::vector<Value*> inputs;
  std::vector<Node*> unread;
  Shape tables;
  for (Value* part : concat.inputs) {
    if (!finder.can_be_part(part, rank)) return false;
    std::optional<Lookup> found = finder.lookup(part, concat, rows);
    tables.emplace_back(found ? 1 : 0);
    if (!found) {
      inputs.push_back(part);
      continue;
    }
    inputs.insert(inputs.end(), {found->table, found->ids});
    unread.insert(unread.end(), found->nodes.begin(), found->nodes.end());
  }
  if (std::count(tables.begin(), tables.end(), Dim(1)) < kFewest) return false;
  if (!context.may_rewrite()) return false;
  ops::Writer write(graph, &concat);
  Value* made =
      write.make_ours("Lookups", inputs, result->type, {{"axis", Dim(axis)}, {"tables", tables}});
  ir::replace_uses(*concat.outputs[0], *made, graph);
  unread.push_back(&concat);
  erase_unread(graph, unread);
  return true;
}

void join(Graph& graph, const std::vector<Node*>& gradients) {
  std::vector<Value*> inputs;
  std::vector<ir::Type> types;
  Shape paddings;
  for (const Node* node : gradients) {
    inputs.insert(inputs.end(), node->inputs.begin(), node->inputs.end());
    types.push_back(node->outputs[0]->type);
    paddings.emplace_back(ir::int_attr(node->attrs, "padding_idx", -1));
  }
  ops::Writer write(graph, gradients.back());
  const Node& joined = write.add({ir::kTorchOrtDomain, "EmbeddingGrads"}, std::move(inputs), types,
                                 {{"padding_idxs", paddings}});
  for (size_t i = 0; i < gradients.size(); ++i) {
    ir::replace_uses(*gradients[i]->outputs[0], *joined.outputs[i], graph);
    ir::erase(graph, *gradients[i]);
  }
}

int join_gradients(Graph& graph, const Finder& finder, PassContext& context) {
  using Key = std::pair<const Value*, DType>;
  std::vector<Key> order;
  std::map<Key, std::vector<Node*>> found;
  for (Node& node : graph.nodes) {
    if (!finder.is_gradient(node)) continue;
    const Key key = {SharedMemory::root(node.inputs[0]), node.outputs[0]->type.dtype};
    if (found[key].empty()) order.push_back(key);
    found[key].push_back(&node);
  }
  int rewrites = 0;
  for (const Key& key : order) {
    if (static_cast<int64_t>(found[key].size()) < kFewest) continue;
    if (!context.may_rewrite()) break;
    join(graph, found[key]);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace

int join_lookups(Graph& graph, PassContext& context) {
  int rewrites = 0;
  {
    const Finder finder(graph);
    for (Node& node : graph.nodes) {
      if (node.is_erased() || !ir::is(&node, "Concat")) continue;
      if (join(graph, node, finder, context)) ++rewrites;
    }
  }
  return rewrites + join_gradients(graph, Finder(graph), context);
}

}  // namespace torch_ort::passes
