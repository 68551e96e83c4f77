// Fused regions, and the ops that are there for their bodies: class labels that name a column of a
// row, numbers that sizes make. A label equal to `ignore_index` names no column.

#include "base/error.h"
#include "ops/families.h"
#include "ops/fusion.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

using ir::DType;
using ir::Node;
using ir::Type;
using ir::Value;
using enum AttrKind;
using Kind = FusedForm::Kind;

// The node becomes one call, which run/ turns into a kernel of the device's code generator.
void lower_region(const Node& node, CallList& calls) {
  ArgList args;
  for (size_t i = 0; i < node.inputs.size(); ++i) args.emplace_back(&input(node, i));
  calls.add("torch_ort::region", "", std::move(args), node.outputs);
}

// As above, but the tensor that the sums begin with may be left out.
void lower_rows_product(const Node& node, CallList& calls) {
  ArgList args;
  for (size_t i = 0; i < 4; ++i) {
    if (i != 2 || has_input(node, i)) args.emplace_back(&input(node, i));
  }
  calls.add("torch_ort::region", "", std::move(args), node.outputs);
}

Value* typed(CallList& calls, const Value& like, DType dtype) {
  Type type = with_shape(like.type, like.type.shape);
  type.dtype = dtype;
  return calls.temporary(type);
}

// For each label whether it is not the ignored one; nullptr if none is ignored.
Value* add_valid(const Node& node, Value* label, CallList& calls) {
  if (!ir::has_attr(node.attrs, "ignore_index")) return nullptr;
  Value* valid = typed(calls, *label, DType::kBool);
  calls.add("aten::ne", "Scalar", {label, ir::int_attr(node.attrs, "ignore_index", 0)}, {valid});
  return valid;
}

// The labels as an index tensor with a last dim of size 1. Ignored labels become 0, which exists.
Value* add_index(Value* label, Value* valid, CallList& calls) {
  if (valid != nullptr) {
    Value* safe = typed(calls, *label, label->type.dtype);
    calls.add("aten::mul", "Tensor", {label, valid}, {safe});
    label = safe;
  }
  ir::Shape shape = *label->type.shape, strides = strides_of(label->type);
  shape.push_back(1);
  strides.push_back(1);
  Value* index = calls.temporary(view_type(label->type, shape, strides));
  calls.add("aten::unsqueeze", "", {label, -1}, {index});
  return index;
}

// x, but 0 where the label is ignored.
void add_masked(Value* valid, Value* x, Value* result, CallList& calls) {
  if (valid != nullptr) {
    calls.add("aten::where", "ScalarOther", {valid, x, 0.0}, {result});
  } else {
    calls.add("aten::clone", "", {x, "contiguous_format"}, {result});
  }
}

void lower_pick(const Node& node, CallList& calls) {
  Value *x = &input(node, 0), *label = &input(node, 1), *result = node.outputs[0];
  known_shape(node, *label);
  Value* valid = add_valid(node, label, calls);
  Value* index = add_index(label, valid, calls);
  Value* gathered = calls.temporary(with_shape(x->type, index->type.shape));
  Value* picked = typed(calls, *result, result->type.dtype);
  calls.add("aten::gather", "", {x, -1, index, false}, {gathered});
  calls.add("aten::squeeze", "dim", {gathered, -1}, {picked});
  add_masked(valid, picked, result, calls);
}

void lower_scatter(const Node& node, CallList& calls) {
  Value *label = &input(node, 0), *number = &input(node, 1), *result = node.outputs[0];
  for (const Value* value : {label, number, result}) known_shape(node, *value);
  Value* valid = add_valid(node, label, calls);
  Value* index = add_index(label, valid, calls);
  Value* numbers = calls.temporary(expanded_type(number->type, *label->type.shape));
  Value* row = calls.temporary(with_shape(number->type, label->type.shape));
  calls.add("aten::expand", "", {number, Arg::list(*label->type.shape), false}, {numbers});
  add_masked(valid, numbers, row, calls);
  Value* source = calls.temporary(with_shape(number->type, index->type.shape));
  calls.add("aten::unsqueeze", "", {row, -1}, {source});
  Value* zeros = calls.temporary(result->type);
  calls.add("aten::zeros", "",
            {Arg::list(*result->type.shape), ir::name(result->type.dtype), Arg(),
             device_name(result->type), Arg()},
            {zeros});
  calls.add("aten::scatter", "src", {zeros, -1, index, source}, {result});
}

void lower_valid(const Node& node, CallList& calls) {
  Value *label = &input(node, 0), *result = node.outputs[0];
  Value* valid = add_valid(node, label, calls);
  if (valid == nullptr) {
    calls.add("aten::ones_like", "",
              {label, ir::name(result->type.dtype), Arg(), Arg(), Arg(), "contiguous_format"},
              {result});
    return;
  }
  calls.add("aten::_to_copy", "",
            {valid, ir::name(result->type.dtype), Arg(), Arg(), Arg(), false, Arg()}, {result});
}

void lower_mul_add(const Node& node, CallList& calls) {
  calls.add("aten::addcmul", "", {&input(node, 2), &input(node, 0), &input(node, 1), 1},
            node.outputs);
}

void lower_log1p(const Node& node, CallList& calls) {
  calls.add("aten::log1p", "", {&input(node, 0)}, node.outputs);
}

void lower_size_ratio(const Node& node, CallList& calls) {
  Value* result = node.outputs[0];
  // Regions contain it as a constant.
  if (!is_read_as_tensor(*result)) return;
  const SizeRatio ratio = size_ratio(node);
  std::vector<std::pair<const char*, Arg>> rest;
  if (ratio.factor != 1) rest.emplace_back("aten::mul", ratio.factor);
  if (!(ratio.denominator == ir::Dim(1))) rest.emplace_back("aten::div", ratio.denominator);
  Value* number = rest.empty() ? result : calls.temporary(result->type);
  calls.add("aten::full", "",
            {Arg::list(ir::Shape()), ratio.numerator, ir::name(result->type.dtype), Arg(),
             device_name(result->type), Arg()},
            {number});
  for (size_t i = 0; i < rest.size(); ++i) {
    Value* next = i + 1 == rest.size() ? result : calls.temporary(result->type);
    calls.add(rest[i].first, "Tensor", {number, rest[i].second}, {next});
    number = next;
  }
}

Op own(std::string name, int inputs, Lowering lower, std::vector<AttrRule> attributes,
       FusedRule fused = {}) {
  Op op;
  op.name = std::move(name);
  op.domain = ir::kTorchOrtDomain;
  op.min_inputs = op.max_inputs = inputs;
  op.attributes = std::move(attributes);
  op.lower = lower;
  op.work.fused = fused;
  return op;
}

}  // namespace

void register_region(Registry& ops) {
  Op region = own("Region", 1, lower_region,
                  {{"body", kGraph, true},
                   {"columns", kDim},
                   {"has_row_list", kInt},
                   {"rows", kDim},
                   {"spaces", kStrings, true}});
  region.max_inputs = region.max_outputs = -1;
  region.kernel = {.row_lists = 1, .row_lists_if = "has_row_list"};
  ops.add(region);
  const AttrRule ignored = {"ignore_index", kInt};
  ops.add(own("RowPick", 2, lower_pick, {ignored}, Kind::kPick));
  ops.add(own("RowScatter", 2, lower_scatter, {ignored}, Kind::kScatter));
  ops.add(own("RowValid", 1, lower_valid, {ignored}, Kind::kValid));
  // a * b + c, rounded once in regions
  Op mul_add = own("MulAdd", 3, lower_mul_add, {}, Pointwise::kMulAdd);
  mul_add.work.elementwise = true;
  ops.add(mul_add);
  // log(1 + x), which keeps the digits of a small x
  Op log1p = own("Log1p", 1, lower_log1p, {}, Pointwise::kLog1p);
  log1p.work.elementwise = true;
  ops.add(log1p);
  // factor * numerator / denominator, a 0-d tensor
  ops.add(own("SizeRatio", 0, lower_size_ratio,
              {{"denominator", kDim}, {"factor", kFloat}, {"numerator", kDim}}));
  // gradient [..., D], ids [...], [start [V, D]] -> gradient of the table [V, D], [workspace]; see
  // ops/sorted_sums.h
  Op embedding_grad = own("EmbeddingGrad", 2, lower_region, {{"padding_idx", kInt}});
  embedding_grad.max_inputs = 3;
  embedding_grad.max_outputs = 2;
  embedding_grad.kernel = {.writes_strides = false, .start = 2};
  ops.add(embedding_grad);
  // gradient of the result [N, O, H', W'] and image [N, C, H, W] of a convolution, both of which
  // are channels-last -> gradient of the weight [O, C / groups, h, w], which is so too; the same of
  // volumes
  Op convolution = own("ConvolutionWeightGrad", 2, lower_region,
                       {{"dilations", kInts, true},
                        {"groups", kInt, true},
                        {"pads", kInts, true},
                        {"strides", kInts, true}});
  convolution.kernel = {.writes_strides = false, .reads_gaps = false};
  ops.add(convolution);
  // the same, without strides, dilation and groups, for windows of 3x3; of volumes, for 3x3x3
  convolution.name = "WinogradWeightGrad";
  ops.add(convolution);
  // image [N, C, H, W], weight [O, C, 3, 3], [bias [O]] -> convolution [N, O, H', W']; of volumes
  // [N, C, D, H, W], with a weight [O, C, 3, 3, 3]. Channels of images lie side by side. `turned`:
  // the weight is [C, O, 3, 3] and turned by half a turn, as for the gradient of the image of a
  // convolution.
  Op tiled = own("WinogradConvolution", 2, lower_region, {{"pads", kInts, true}, {"turned", kInt}});
  tiled.max_inputs = 3;
  tiled.kernel.needs_runs = true;
  ops.add(tiled);
  // image [N, C, H, W], weight [O, C / groups, h, w], [bias [O]] -> convolution [N, O, H', W'], and
  // of volumes with one dim more. Channels of images lie side by side. `transposed`: the image of
  // which such a convolution has the gradient of the result as input, as of a transposed
  // convolution, with a bias of that image.
  Op plain = own("Convolution", 2, lower_region,
                 {{"dilations", kInts, true},
                  {"groups", kInt},
                  {"pads", kInts, true},
                  {"strides", kInts, true},
                  {"transposed", kInt}});
  plain.max_inputs = 3;
  plain.kernel.needs_runs = true;
  ops.add(plain);
  // image [N, C, H, W], weight [C, 1, h, w], [bias [C]] -> convolution of each channel by itself
  // [N, C, H', W']. Channels of images lie side by side. `transposed`: the image of which such a
  // convolution has the gradient of the result as input, as of a transposed convolution.
  Op each = own("DepthwiseConvolution", 2, lower_region,
                {{"dilations", kInts, true},
                 {"pads", kInts, true},
                 {"strides", kInts, true},
                 {"transposed", kInt}});
  each.max_inputs = 3;
  each.kernel.needs_runs = true;
  ops.add(each);
  // gradient of the result [N, C, H', W'] and image [N, C, H, W] of a convolution of each channel
  // by itself, whose channels lie side by side -> gradients of weight [C, 1, h, w] and of bias [C]
  Op depthwise = own("DepthwiseWeightGrad", 2, lower_region,
                     {{"dilations", kInts, true}, {"pads", kInts, true}, {"strides", kInts, true}});
  depthwise.max_outputs = 2;
  depthwise.kernel = {.writes_strides = false, .needs_runs = true};
  ops.add(depthwise);
  // gradient, ids, gradient, ids, ... -> gradients of the tables, each as by EmbeddingGrad
  Op embedding_grads = own("EmbeddingGrads", 2, lower_region, {{"padding_idxs", kInts, true}});
  embedding_grads.max_inputs = embedding_grads.max_outputs = -1;
  embedding_grads.kernel.writes_strides = false;
  ops.add(embedding_grads);
  // parts of the result along `axis`: for each number of `tables` a tensor, if it is 0, or else a
  // table and the ids of its rows, one for each index of the dims before the axis
  Op lookups = own("Lookups", 2, lower_region, {{"axis", kInt, true}, {"tables", kInts, true}});
  lookups.max_inputs = -1;
  lookups.kernel.writes_strides = false;
  ops.add(lookups);
  // x, places along `axis` -> x[:, places]. With `from_end` negative places count from the end and
  // errors are those of an index, else of index_select.
  const std::vector<AttrRule> of_places = {{"axis", kInt}, {"from_end", kInt}};
  ops.add(own("Take", 2, lower_region, of_places));
  // gradient of x[:, places], places -> gradient of x, [workspace]; see ops/sorted_sums.h
  Op take_grad = own("TakeGrad", 2, lower_region, of_places);
  take_grad.max_outputs = 2;
  ops.add(take_grad);
  // labels and masks of attention -> a list of rows, int64 [sequences, length + 1]: how many there
  // are, and then their numbers in ascending order. `kinds` states what each input is: "labels",
  // which select the rows whose label is not the `ignored` one, or "mask", which selects the keys
  // that it does not hide, in an attention that may be causal. `places` are positions that are
  // selected in each sequence. With `is_all` all rows are selected, and with `is_closed` all rows
  // of a sequence up to its last selected one.
  Op rows = own("Rows", 0, lower_region,
                {{"ignored", kInts},
                 {"is_causal", kInts},
                 {"is_all", kInt},
                 {"is_closed", kInt},
                 {"kinds", kStrings},
                 {"places", kInts}});
  rows.max_inputs = -1;
  rows.kernel.writes_strides = false;
  ops.add(rows);
  // x, rows -> x with zeros in all other rows
  Op zero_rows = own("ZeroRows", 2, lower_region, {});
  zero_rows.kernel = {.overwrites = 0, .row_lists = 1};
  ops.add(zero_rows);
  // a, b, [start], rows -> start + a b. Only listed rows of a [N, k] are multiplied, and other rows
  // of the result [N, n] are unspecified. With `sums` the list selects columns of a [m, N] and rows
  // of b [N, n], and the sums are over these alone.
  Op rows_product = own("RowsProduct", 2, lower_rows_product, {{"sums", kInt}});
  rows_product.max_inputs = 4;
  rows_product.kernel = {.start = 2, .row_lists = 1};
  ops.add(rows_product);
  // query, key, value, [mask], [kept or seed], [query_rows, key_rows] -> result, logarithms of the
  // denominators
  // Scores are multiplied by `scale`. Then a mask of numbers is added, or `fill` replaces scores
  // where a boolean mask is true. With `is_causal` a query attends to no later key. With
  // `unseen_is_nan` the result of a query that attends to no key is NaN, else zero. Dropout has the
  // attribute `keep`, the probability to keep a weight; its input is a boolean mask, or with the
  // attribute `stream` a seed, as that of PhiloxMask. With `has_rows` the last two inputs are lists
  // (see Rows) of rows of queries and of keys. The rows of each sequence up to its last listed one
  // take part; other results are unspecified.
  const std::vector<AttrRule> of_attention = {
      {"scale", kFloat}, {"fill", kFloat}, {"is_causal", kInt}, {"unseen_is_nan", kInt},
      {"keep", kFloat},  {"stream", kInt}, {"has_rows", kInt}};
  Op attention = own("Attention", 3, lower_region, of_attention);
  attention.max_inputs = 7;
  attention.max_outputs = 2;
  attention.kernel = {.row_lists = 2, .row_lists_if = "has_rows"};
  ops.add(attention);
  // gradient, query, key, value, logarithms, [mask], [kept or seed], [query_rows, key_rows]
  // -> gradients of query, key, value, [masked scores]
  Op attention_grad = own("AttentionGrad", 5, lower_region, of_attention);
  attention_grad.max_inputs = 9;
  attention_grad.max_outputs = 4;
  attention_grad.kernel = attention.kernel;
  ops.add(attention_grad);
  // tensors of one dtype -> the same tensors in another dtype
  Op casts = own("Casts", 1, lower_region, {{"to", kInt, true}});
  casts.max_inputs = casts.max_outputs = -1;
  casts.kernel = {.writes_strides = false, .reads_gaps = false};
  ops.add(casts);
  // see ops/linear_loss.h
  Op loss = own("LinearCrossEntropy", 3, lower_region,
                {{"has_bias", kInt},
                 {"has_class_weight", kInt},
                 {"has_loss_grad", kInt},
                 {"has_row_list", kInt},
                 {"has_square_grad", kInt},
                 {"has_sums_grad", kInt},
                 {"ignore_index", kInt},
                 {"makes_bias_grad", kInt},
                 {"makes_hidden_grad", kInt},
                 {"makes_logits", kInt},
                 {"makes_logsumexp", kInt},
                 {"makes_sums", kInt},
                 {"makes_weight_grad", kInt},
                 {"reduction", kString},
                 {"rows", kInt, true},
                 {"groups", kInt, true},
                 {"soft_cap", kFloat}});
  loss.max_inputs = 9;
  loss.max_outputs = 8;
  loss.kernel = {.writes_strides = false, .row_lists = 1, .row_lists_if = "has_row_list"};
  ops.add(loss);
}

}  // namespace torch_ort::ops
