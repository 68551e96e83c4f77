// Products of two matrices: of the rows with a weight, or sums of products over the rows; and
// losses that compute their logits so.
#include "ops/linear_loss.h"
#include "ops/product.h"
#include "ops/shapes.h"
#include "passes/rows/rewriter.h"
#include "passes/rows/transfer.h"
#include "region/codegen.h"

namespace torch_ort::passes::rows {

namespace {

using ir::Node;
using ir::Value;

constexpr Form kRows = {0, 0}, kColumns = {1, 1};

// Whether the tensor that the product is added to has one row for each row of the product.
bool has_rows(Analysis& rows, const Value* start) {
  return start != nullptr && start->type.shape && start->type.shape->size() == 2 &&
         rows.of(start).form == kRows;
}

// The rows whose label counts.
RowSet counted_rows(Analysis& rows, const Node& node, const ops::LinearLoss& loss) {
  return loss.has_all_rows() ? RowSet::all() : labelled(rows, node.inputs.at(2), loss.ignore_index);
}

bool is_product(Analysis&, const Node& node) {
  for (size_t i : {0, 1}) {
    const Value* factor = node.inputs.at(i);
    if (!factor->type.shape || factor->type.shape->size() != 2) return false;
  }
  for (const char* name : {"transA", "transB"}) {
    if (ir::int_attr(node.attrs, name, 0) != 0) return false;
  }
  for (const char* name : {"alpha", "beta"}) {
    if (ir::float_attr(node.attrs, name, 1) != 1) return false;
  }
  const ir::DType dtype = node.outputs[0]->type.dtype;
  return ir::is_float(dtype) && region::has_kernel(node.outputs[0], "Rows") &&
         dtype == node.inputs[0]->type.dtype && dtype == node.inputs[1]->type.dtype;
}

void nonzero_of_product(Analysis& rows, Node& node) {
  if (!(rows.of(node.inputs[0]).form == kRows)) return;
  RowSet nonzero = rows.of(node.inputs[0]).nonzero;
  if (const Value* start = ops::start_of(node)) {
    nonzero = has_rows(rows, start) ? unite(nonzero, rows.of(start).nonzero) : RowSet::all();
  }
  rows.set(node.outputs[0], kRows, nonzero);
}

void needed_of_product(Analysis& rows, Node& node) {
  const Value *a = node.inputs[0], *b = node.inputs[1], *start = ops::start_of(node);
  if (rows.of(a).form == kColumns && rows.of(b).form == kRows) {
    const RowSet nonzero = intersect(rows.of(a).nonzero, rows.of(b).nonzero);
    const Work work = rows.compute(node, {.rows = nonzero, .sums = true});
    rows.need(a, work.rows);
    rows.need(b, work.rows);
    rows.need(start, RowSet::all());
    return;
  }
  Work work;
  if (rows.of(a).form == kRows) {
    const Facts& result = rows.of(node.outputs[0]);
    work.rows = intersect(result.needed, result.nonzero);
  }
  work = rows.compute(node, work);
  rows.need(a, work.rows);
  rows.need(b, RowSet::all());
  rows.need(start, has_rows(rows, start) ? work.rows : RowSet::all());
}

void list_product(Rewriter& rewriter, Node& node, const Work& work) {
  rewriter.replace(node, "RowsProduct",
                   {node.inputs[0], node.inputs[1], ops::start_of(node), rewriter.list(work.rows)},
                   {{"sums", int64_t{work.sums ? 1 : 0}}});
}

bool is_linear_loss_with_lists(Analysis&, const Node& node) {
  return region::has_kernel(node.outputs[0], "Rows");
}

void nonzero_of_linear_loss(Analysis& rows, Node& node) {
  const ops::LinearLoss loss = ops::linear_loss(node);
  const RowSet counted = counted_rows(rows, node, loss);
  if (!loss.has_hidden_grad) return;
  const ir::Value* gradient = node.outputs.at(loss.hidden_grad());
  rows.set(gradient, rows.leading(gradient), counted);
}

void needed_of_linear_loss(Analysis& rows, Node& node) {
  const ops::LinearLoss loss = ops::linear_loss(node);
  Work work;
  if (rows.leading(node.inputs[0]).is_joint()) {
    work.rows = counted_rows(rows, node, loss);
    if (loss.has_hidden_grad) {
      work.rows = unite(work.rows, rows.of(node.outputs.at(loss.hidden_grad())).needed);
    }
  }
  work = rows.compute(node, work);
  rows.need(node.inputs[0], loss.has_logits ? RowSet::all() : work.rows);
  for (size_t i = 1; i < node.inputs.size(); ++i) rows.need(node.inputs[i], RowSet::all());
}

void list_linear_loss(Rewriter& rewriter, Node& node, const Work& work) {
  ops::LinearLoss loss = ops::linear_loss(node);
  loss.has_row_list = true;
  ops::write(loss, node.attrs);
  ir::set_input(node, static_cast<int>(node.inputs.size()), rewriter.list(work.rows));
  const ir::Shape& weight = *node.inputs[1]->type.shape;
  node.outputs[1]->type.shape =
      ir::Shape{ops::workspace_size(loss, weight[0].constant(), weight[1].constant())};
}

constexpr Transfer kTransfers[] = {
    {"Gemm", is_product, nonzero_of_product, needed_of_product, list_product},
    {"MatMul", is_product, nonzero_of_product, needed_of_product, list_product},
    {"torch_ort.RowsProduct", is_product, nonzero_of_product, needed_of_product},
    {"torch_ort.LinearCrossEntropy", is_linear_loss_with_lists, nonzero_of_linear_loss,
     needed_of_linear_loss, list_linear_loss},
};

}  // namespace

std::span<const Transfer> of_products() { return kTransfers; }

}  // namespace torch_ort::passes::rows
