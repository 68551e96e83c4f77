// Ops that make one number of many, along axes: sums, means, extremes and their places.

#include "base/error.h"
#include "ops/dtypes.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <algorithm>
#include <iterator>
#include <string_view>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::DType;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using enum AttrKind;

bool keeps_dims(const Node& node) { return ir::int_attr(node.attrs, "keepdims", 1) != 0; }

Shape reduced_shape(const Shape& from, const std::vector<int64_t>& axes, bool keeps) {
  Shape shape;
  for (size_t i = 0; i < from.size(); ++i) {
    const bool is_reduced =
        std::find(axes.begin(), axes.end(), static_cast<int64_t>(i)) != axes.end();
    if (!is_reduced)
      shape.push_back(from[i]);
    else if (keeps)
      shape.push_back(1);
  }
  return shape;
}

// ---- Reduce*

// Whether reductions to the largest or smallest element take it.
bool is_ordered(DType dtype) {
  return is_summable(dtype) || dtype == DType::kInt8 || dtype == DType::kUInt8 ||
         dtype == DType::kBool;
}

struct Reduction {
  const char* name;
  FusedRule fused = {};
  // The operator along axes, with its overload, and the one for all elements; nullptr: none does
  // the same.
  const char *along = nullptr, *overload = "", *total = nullptr;
  bool (*accepts)(DType) = nullptr;
  // Whether the operators take the dtype of the result, as their last argument.
  bool has_dtype = false;
};

constexpr Reduction kReductions[] = {
    {"ReduceL1"},
    {"ReduceL2"},
    {"ReduceLogSumExp", {}, "aten::logsumexp", "", nullptr, ir::is_float},
    {"ReduceMax", FusedForm::Kind::kMax, "aten::amax", "", "aten::max", is_ordered},
    {"ReduceMean", FusedForm::Kind::kMean, "aten::mean", "dim", "aten::mean", ir::is_float, true},
    {"ReduceMin", FusedForm::Kind::kMin, "aten::amin", "", "aten::min", is_ordered},
    {"ReduceProd", {}, "aten::prod", "dim_int", "aten::prod", is_summable, true},
    {"ReduceSum", FusedForm::Kind::kSum, "aten::sum", "dim_IntList", "aten::sum", is_summable,
     true},
};

std::vector<Pair> pairs_of(const Reduction& row) {
  std::vector<Pair> pairs;
  std::vector<Pair::Argument> arguments;
  if (row.has_dtype) arguments = {{"dtype", nullptr, Arg()}};
  if (row.along != nullptr) {
    pairs.push_back({.aten = row.along,
                     .accepts = row.accepts,
                     .form = Pair::Form::kAlong,
                     .overloads = {row.overload},
                     .arguments = arguments});
  }
  if (row.total != nullptr) {
    pairs.push_back({.aten = row.total,
                     .accepts = row.accepts,
                     .form = Pair::Form::kTotal,
                     .arguments = arguments});
  }
  return pairs;
}

// In older opsets the axes are an attribute.
bool names_axes(const Node& node) { return has_input(node, 1) || ir::has_attr(node.attrs, "axes"); }

// The axes, all of them positive. Nothing if there are none and the node leaves the tensor as it
// is.
std::optional<std::vector<int64_t>> reduced_axes(const Node& node) {
  const auto rank = static_cast<int64_t>(known_shape(node, input(node, 0)).size());
  std::vector<int64_t> axes;
  if (names_axes(node)) {
    const Shape given =
        has_input(node, 1) ? known_ints(node.inputs[1]) : ir::ints_attr(node.attrs, "axes", {});
    axes = wrap_axes(node, given, rank);
  }
  if (!axes.empty()) return axes;
  if (ir::int_attr(node.attrs, "noop_with_empty_axes", 0) != 0) return std::nullopt;
  for (int64_t axis = 0; axis < rank; ++axis) axes.push_back(axis);
  return axes;
}

std::vector<Type> infer_reduction(const Node& node) {
  const Type& x = input(node, 0).type;
  if (!x.shape || (has_input(node, 1) && !has_known_ints(node.inputs[1]))) {
    return {with_shape(x, std::nullopt)};
  }
  const std::optional<std::vector<int64_t>> axes = reduced_axes(node);
  if (!axes) return {with_shape(x, x.shape)};
  return {with_shape(x, reduced_shape(*x.shape, *axes, keeps_dims(node)))};
}

// Whether all elements are reduced to a 0-d tensor. Several kernels have an overload for this.
bool is_total(const Node& node) { return !names_axes(node) && !keeps_dims(node); }

void lower_to(const Pair& pair, Value* x, const Arg& axes, const Node& node, Value* result,
              CallList& calls) {
  ArgList args = {x};
  if (pair.form == Pair::Form::kAlong) args.insert(args.end(), {axes, keeps_dims(node)});
  // PyTorch adds and multiplies smaller integers in int64, unless it is told otherwise.
  const DType dtype = x->type.dtype;
  const bool is_small = ir::is_integer(dtype) && dtype != DType::kInt64;
  for (const Pair::Argument& argument : pair.arguments) {
    const bool says_dtype = is_small && std::string_view(argument.name) == "dtype";
    args.push_back(says_dtype ? Arg(ir::name(dtype)) : argument.value);
  }
  calls.add(pair.aten, pair.overloads[0], std::move(args), {result});
}

// PyTorch's kernel takes one axis.
void lower_prod(const Pair& along, std::vector<int64_t> left, const Node& node, CallList& calls) {
  Value *x = node.inputs[0], *result = node.outputs[0];
  // The last axis comes first, so that the numbers of the remaining axes stay valid.
  std::sort(left.begin(), left.end(), std::greater<>());
  for (size_t i = 0; i < left.size(); ++i) {
    Value* next = result;
    if (i + 1 < left.size()) {
      next = calls.temporary(
          with_shape(x->type, reduced_shape(*x->type.shape, {left[i]}, keeps_dims(node))));
    }
    lower_to(along, x, left[i], node, next, calls);
    x = next;
  }
}

void lower_norm(const Node& node, double order, const Arg& axes, CallList& calls) {
  const Arg dims = names_axes(node) ? axes : Arg();
  calls.add("aten::linalg_vector_norm", "", {node.inputs[0], order, dims, keeps_dims(node), Arg()},
            {node.outputs[0]});
}

void lower_reduction(const Node& node, CallList& calls) {
  const std::optional<std::vector<int64_t>> axes = reduced_axes(node);
  const std::vector<Pair>& pairs = registry().find(node.op)->pairs;
  const bool is_norm = pairs.empty(), is_prod = node.op.name == "ReduceProd";
  if (!axes) {
    if (is_norm)
      throw Unsupported(concat(node.op.str(), ": noop_with_empty_axes = 1 without axes"));
    calls.add("aten::clone", "", {node.inputs[0], "contiguous_format"}, {node.outputs[0]});
  } else if (is_norm) {
    lower_norm(node, node.op.name == "ReduceL1" ? 1.0 : 2.0, Arg::list(*axes), calls);
  } else if (pairs.size() > 1 && (is_total(node) || (is_prod && axes->empty()))) {
    lower_to(pairs[1], node.inputs[0], Arg(), node, node.outputs[0], calls);
  } else if (is_prod) {
    lower_prod(pairs[0], *axes, node, calls);
  } else {
    lower_to(pairs[0], node.inputs[0], Arg::list(*axes), node, node.outputs[0], calls);
  }
}

// The overload without axes has no `out=`.
bool take_sum_along_all(const Call& call, bool, CallList& calls) {
  if (!call.overload.empty()) return false;
  const Arg dtype = call.args.size() > 1 ? call.args[1] : Arg();
  calls.add("aten::sum", "dim_IntList", {call.args.at(0), ArgList{}, false, dtype}, call.outputs);
  return true;
}

// The `out=` of the overload without axes gives infinities for no elements, where others raise.
bool take_extreme_along_all(const Call& call, bool, CallList& calls) {
  if (!call.overload.empty()) return false;
  const char* along = call.op == "aten::max" ? "aten::amax" : "aten::amin";
  calls.add(along, "", {call.args.at(0), ArgList{}, false}, call.outputs);
  return true;
}

// Sums take axes as an input sooner than others do. In all opsets, no axes means all of them.
int reduction_since(const Node& node) {
  const bool is_extreme = node.op.name == "ReduceMax" || node.op.name == "ReduceMin";
  if (is_extreme && input(node, 0).type.dtype == DType::kBool) return 20;
  if (ir::has_attr(node.attrs, "noop_with_empty_axes") || node.inputs.size() > 1) {
    return node.op.name == "ReduceSum" ? 13 : 18;
  }
  return 12;
}

// ---- ArgMax, ArgMin

int64_t arg_axis(const Node& node) {
  const auto rank = static_cast<int64_t>(known_shape(node, input(node, 0)).size());
  return wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank);
}

std::vector<Type> infer_arg(const Node& node) {
  const Type& x = input(node, 0).type;
  std::optional<Shape> shape;
  if (x.shape) shape = reduced_shape(*x.shape, {arg_axis(node)}, keeps_dims(node));
  Type type = with_shape(x, shape);
  type.dtype = DType::kInt64;
  return {type};
}

void lower_arg(const Node& node, CallList& calls) {
  if (ir::int_attr(node.attrs, "select_last_index", 0) != 0) {
    throw Unsupported(concat(node.op.str(), ": select_last_index: got 1, want 0"));
  }
  lower_pair(node, calls);
}

// ---- CumSum

void lower_cumsum(const Node& node, CallList& calls) {
  for (const char* name : {"exclusive", "reverse"}) {
    if (ir::int_attr(node.attrs, name, 0) != 0)
      throw Unsupported(concat("CumSum: ", name, ": got 1, want 0"));
  }
  const auto rank = static_cast<int64_t>(known_shape(node, input(node, 0)).size());
  const std::vector<int64_t> axes = wrap_axes(node, known_ints(&input(node, 1)), rank);
  if (axes.size() != 1) throw UserError(concat("CumSum: axis: got ", axes.size(), ", want one"));
  // PyTorch sums smaller integers in int64, unless it is told otherwise.
  const DType dtype = input(node, 0).type.dtype;
  const Arg as = ir::is_float(dtype) ? Arg() : Arg(ir::name(dtype));
  calls.add("aten::cumsum", "", {node.inputs[0], axes[0], as}, {node.outputs[0]});
}

int cumsum_since(const Node& node) { return input(node, 0).type.dtype == DType::kHalf ? 14 : 11; }

}  // namespace

void register_reduction(Registry& ops) {
  for (const auto& [name, aten] :
       {std::pair("ArgMax", "aten::argmax"), std::pair("ArgMin", "aten::argmin")}) {
    Op op;
    op.name = name;
    op.pairs = {{.aten = aten,
                 .accepts = ir::is_number,
                 .gives = DType::kInt64,
                 .arguments = {{"dim", "axis", 0, true}, {"keepdim", "keepdims", true}}}};
    op.attributes = {{"axis", kInt}, {"keepdims", kInt}, {"select_last_index", kInt}};
    op.since = 12;
    op.infer = infer_arg;
    op.lower = lower_arg;
    ops.add(op);
  }

  Op cumsum;
  cumsum.name = "CumSum";
  cumsum.min_inputs = cumsum.max_inputs = 2;
  cumsum.attributes = {{"exclusive", kInt}, {"reverse", kInt}};
  cumsum.since = 11;
  cumsum.bfloat16_since = 14;
  cumsum.since_of = cumsum_since;
  cumsum.infer = infer_like_first;
  cumsum.lower = lower_cumsum;
  cumsum.int_inputs = {1};
  ops.add(cumsum);

  for (const Reduction& row : kReductions) {
    Op op;
    op.name = row.name;
    op.max_inputs = 2;
    op.attributes = {{"axes", kInts}, {"keepdims", kInt}, {"noop_with_empty_axes", kInt}};
    op.since = 12;
    op.pairs = pairs_of(row);
    op.since_of = reduction_since;
    op.infer = infer_reduction;
    op.lower = lower_reduction;
    op.int_inputs = {1};
    op.work.fused = row.fused;
    ops.add(op);
  }
  ops.add(Operator{.name = "aten::sum", .out_rewrite = take_sum_along_all});
  for (const char* name : {"aten::max", "aten::min"}) {
    ops.add(Operator{.name = name, .out_rewrite = take_extreme_along_all});
  }
}

}  // namespace torch_ort::ops
