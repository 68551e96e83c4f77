// Attention: queries, keys and values have a row of each head for each position.
#include "ops/op.h"
#include "passes/rows/rewriter.h"
#include "passes/rows/transfer.h"

#include <limits>

namespace torch_ort::passes::rows {

namespace {

using ir::Node;
using ir::Shape;
using ir::Value;

constexpr Form kHeads = {0, 2};

bool is_gradient(const Node& node) { return ir::is(&node, "AttentionGrad", ir::kTorchOrtDomain); }

// Where the queries are; keys and values follow. The inputs of a gradient begin with that of the
// result.
size_t query_of(const Node& node) { return is_gradient(node) ? 1 : 0; }

// Whether queries, keys and values, and the gradient, have the same positions.
bool is_self_attention(Analysis& rows, const Node& node) {
  for (size_t i = 0; i < query_of(node) + 3; ++i) {
    if (!(rows.of(node.inputs[i]).form == kHeads)) return false;
  }
  return true;
}

// The keys that queries in `queries` attend to.
RowSet keys_of(Analysis& rows, const Node& node, const RowSet& queries) {
  const size_t optional = is_gradient(node) ? 5 : 3;
  const bool is_causal = ir::int_attr(node.attrs, "is_causal", 0) != 0;
  const bool drops = ir::has_attr(node.attrs, "keep");
  const size_t last = node.inputs.size() - (drops ? 1 : 0) - ops::row_list_inputs(node).size();
  RowSet keys = is_causal ? queries : RowSet::all();
  if (last <= optional || node.inputs[optional] == nullptr) return keys;
  Value* mask = node.inputs[optional];
  if (!mask->type.shape || mask->type.shape->empty() || mask->type.shape->size() > 4) return keys;
  const Shape& shape = *mask->type.shape;
  const bool is_wide = shape.back() == rows.space().length;
  const bool is_each = shape.size() == 4 && shape[0] == rows.space().sequences;
  const bool is_shared = shape.size() < 4 || shape[0] == ir::Dim(1);
  if (!is_wide || (!is_each && !is_shared)) return keys;
  if (mask->type.dtype == ir::DType::kBool) {
    const double fill = ir::float_attr(node.attrs, "fill", 0);
    if (fill > std::numeric_limits<float>::lowest() / 2) return keys;
  }
  const RowSet shown =
      rows.atom({.kind = Atom::Kind::kMask, .source = mask, .is_causal = is_causal}).closed();
  return intersect(shown, keys);
}

void nonzero_of_attention(Analysis& rows, Node& node) {
  if (!is_self_attention(rows, node)) return;
  // This notes the rows that the mask selects.
  keys_of(rows, node, RowSet::all());
  for (const Value* output : node.outputs) rows.set(output, kHeads, RowSet::all());
}

void nonzero_of_attention_grad(Analysis& rows, Node& node) {
  if (!is_self_attention(rows, node)) return;
  const RowSet queries = rows.of(node.inputs[0]).nonzero.closed();
  const RowSet keys = keys_of(rows, node, queries);
  rows.set(node.outputs[0], kHeads, queries);
  rows.set(node.outputs.at(1), kHeads, keys);
  rows.set(node.outputs.at(2), kHeads, keys);
}

void needed_of_attention(Analysis& rows, Node& node) {
  const size_t query = query_of(node);
  Work work;
  if (is_self_attention(rows, node)) {
    work.rows = is_gradient(node) ? rows.of(node.inputs[0]).nonzero : rows.needed_of_outputs(node);
    work.rows = work.rows.closed();
    work.keys = keys_of(rows, node, work.rows);
    // Zeros are written only to values whose leading dims are those of rows.
    if (is_gradient(node)) {
      work.rows = unite(work.rows, rows.of(node.outputs[0]).needed).closed();
      for (size_t i : {1, 2}) {
        work.keys = unite(work.keys, rows.of(node.outputs[i]).needed).closed();
      }
    }
  }
  work = rows.compute(node, work);
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (i == query + 1 || i == query + 2) {
      rows.need(node.inputs[i], work.keys);
    } else {
      const bool has_queries = i <= query || (is_gradient(node) && i == 4);
      rows.need(node.inputs[i], has_queries ? work.rows : RowSet::all());
    }
  }
}

void list_attention(Rewriter& rewriter, Node& node, const Work& work) {
  const int count = static_cast<int>(node.inputs.size());
  ir::set_input(node, count, rewriter.list(work.rows));
  ir::set_input(node, count + 1, rewriter.list(work.keys));
  node.attrs["has_rows"] = int64_t{1};
}

constexpr Transfer kTransfers[] = {
    {"torch_ort.Attention", nullptr, nonzero_of_attention, needed_of_attention, list_attention},
    {"torch_ort.AttentionGrad", nullptr, nonzero_of_attention_grad, needed_of_attention,
     list_attention},
};

}  // namespace

std::span<const Transfer> of_attention() { return kTransfers; }

}  // namespace torch_ort::passes::rows
