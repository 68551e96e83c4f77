// Matrix products.

#include "base/error.h"
#include "ops/broadcast.h"
#include "ops/dtypes.h"
#include "ops/families.h"
#include "ops/product.h"
#include "ops/shapes.h"

#include <algorithm>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

// ---- MatMul: products of the last two dims; a vector has one of them

Shape batch_dims(const Shape& shape) { return {shape.begin(), shape.end() - 2}; }

std::vector<Type> infer_matmul(const Node& node) {
  want_same_dtype(node, {0, 1});
  const Type &x = input(node, 0).type, &y = input(node, 1).type;
  if (!x.shape || !y.shape) return {type_like_inputs(node, x.dtype, std::nullopt)};
  Shape a = *x.shape, b = *y.shape;
  if (a.empty() || b.empty()) throw UserError("MatMul: an input without dims, want rank 1 or more");
  const bool is_row = a.size() == 1, is_column = b.size() == 1;
  if (is_row) a.insert(a.begin(), Dim(1));
  if (is_column) b.push_back(Dim(1));
  same_dim(node, a.back(), b[b.size() - 2]);
  std::optional<Shape> shape = broadcast(node, batch_dims(a), batch_dims(b));
  if (shape && !is_row) shape->push_back(a[a.size() - 2]);
  if (shape && !is_column) shape->push_back(b.back());
  return {type_like_inputs(node, x.dtype, shape)};
}

Value* reshaped(CallList& calls, Value* x, const Shape& shape) {
  Value* result = calls.temporary(with_shape(x->type, shape));
  calls.add("aten::reshape", "", {x, Arg::list(shape)}, {result});
  return result;
}

// The rows of all batches are multiplied by one matrix.
void lower_shared_matrix(const Node& node, CallList& calls) {
  Value *x = node.inputs[0], *y = node.inputs[1], *result = node.outputs[0];
  Shape shape = *x->type.shape;
  const Dim depth = shape.back();
  shape.pop_back();
  const Dim rows = ir::numel(shape);
  Value* flat = reshaped(calls, x, {rows, depth});
  Value* product = calls.temporary(with_shape(x->type, Shape{rows, y->type.shape->back()}));
  calls.add("aten::mm", "", {flat, y}, {product});
  shape.push_back(y->type.shape->back());
  calls.add("aten::reshape", "", {product, Arg::list(shape)}, {result});
}

// Both operands have the same batch dims, which become one.
void lower_equal_batches(const Node& node, CallList& calls) {
  Value *x = node.inputs[0], *y = node.inputs[1], *result = node.outputs[0];
  const Shape &a = *x->type.shape, &b = *y->type.shape;
  Shape shape = batch_dims(a);
  const Dim batch = ir::numel(shape), rows = a[a.size() - 2], columns = b.back();
  Value* left = reshaped(calls, x, {batch, rows, a.back()});
  Value* right = reshaped(calls, y, {batch, b[b.size() - 2], columns});
  Value* product = calls.temporary(with_shape(x->type, Shape{batch, rows, columns}));
  calls.add("aten::bmm", "", {left, right}, {product});
  shape.insert(shape.end(), {rows, columns});
  calls.add("aten::reshape", "", {product, Arg::list(shape)}, {result});
}

void lower_matmul(const Node& node, CallList& calls) {
  Value *x = &input(node, 0), *y = &input(node, 1);
  const Shape &a = known_shape(node, *x), &b = known_shape(node, *y);
  const auto call = [&](const char* op) { calls.add(op, "", {x, y}, {node.outputs[0]}); };
  if (a.size() == 2 && b.size() == 2) return call("aten::mm");
  if (a.size() == 2 && b.size() == 1) return call("aten::mv");
  if (a.size() == 1 && b.size() == 1) return call("aten::dot");
  if (a.size() > 2 && b.size() == 2) return lower_shared_matrix(node, calls);
  if (a.size() > 2 && a.size() == b.size() && batch_dims(a) == batch_dims(b)) {
    return a.size() == 3 ? call("aten::bmm") : lower_equal_batches(node, calls);
  }
  call("aten::matmul");
}

// ---- WideMatMul: a product of two matrices of a short float, in float32

std::vector<Type> infer_wide_matmul(const Node& node) {
  Type type = infer_matmul(node)[0];
  type.dtype = ir::DType::kFloat;
  return {type};
}

void lower_wide_matmul(const Node& node, CallList& calls) {
  calls.add("aten::mm", "dtype", {&input(node, 0), &input(node, 1), ir::name(ir::DType::kFloat)},
            {node.outputs[0]});
}

// ---- MatMulAdd: products of batches of matrices, added to a tensor of their shape if there is one

std::vector<Type> infer_matmul_add(const Node& node) {
  const std::vector<Type> types = infer_matmul(node);
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!has_input(node, i)) continue;
    const Type& type = input(node, i).type;
    if (type.shape && type.shape->size() != 3) {
      throw UserError(concat("MatMulAdd: input ", i, ": got ", ir::to_string(*type.shape),
                             ", want batches of matrices"));
    }
  }
  const auto &a = input(node, 0).type.shape, &b = input(node, 1).type.shape;
  if (a && b) same_dim(node, a->front(), b->front());
  if (!has_input(node, 2)) return types;
  want_same_dtype(node, {0, 2});
  const Type& start = input(node, 2).type;
  for (size_t i = 0; i < 3 && start.shape && types[0].shape; ++i) {
    same_dim(node, (*types[0].shape)[i], (*start.shape)[i]);
  }
  return types;
}

void lower_matmul_add(const Node& node, CallList& calls) {
  Value *a = &input(node, 0), *b = &input(node, 1), *result = node.outputs[0];
  if (has_input(node, 2)) return calls.add("aten::baddbmm", "", {node.inputs[2], a, b}, {result});
  calls.add("aten::bmm", "", {a, b}, {result});
}

// ---- Gemm: alpha * A * B + beta * C, either factor transposed

struct Sides {
  Dim rows, depth_of_a, depth_of_b, columns;
};

Sides sides(const Node& node) {
  const Shape &a = known_shape(node, input(node, 0)), &b = known_shape(node, input(node, 1));
  if (a.size() != 2 || b.size() != 2) {
    throw UserError(concat("Gemm: inputs: got ", ir::to_string(a), " and ", ir::to_string(b),
                           ", want two matrices"));
  }
  const size_t flip_a = ir::int_attr(node.attrs, "transA", 0) != 0 ? 1 : 0;
  const size_t flip_b = ir::int_attr(node.attrs, "transB", 0) != 0 ? 1 : 0;
  return {a[flip_a], a[1 - flip_a], b[flip_b], b[1 - flip_b]};
}

std::vector<Type> infer_gemm(const Node& node) {
  const Type& x = input(node, 0).type;
  if (has_input(node, 2))
    want_same_dtype(node, {0, 1, 2});
  else
    want_same_dtype(node, {0, 1});
  if (!x.shape || !input(node, 1).type.shape) {
    return {type_like_inputs(node, x.dtype, std::nullopt)};
  }
  const Sides found = sides(node);
  same_dim(node, found.depth_of_a, found.depth_of_b);
  return {type_like_inputs(node, x.dtype, Shape{found.rows, found.columns})};
}

Value* transposed(CallList& calls, Value* matrix) {
  const Shape &shape = *matrix->type.shape, strides = strides_of(matrix->type);
  Value* result = calls.temporary(
      view_type(matrix->type, Shape{shape[1], shape[0]}, Shape{strides[1], strides[0]}));
  calls.add("aten::permute", "", {matrix, Arg::list(std::vector<int64_t>{1, 0})}, {result});
  return result;
}

// Kernels for integers require integer factors.
Arg factor(const Node& node, const char* name) {
  const double value = ir::float_attr(node.attrs, name, 1.0);
  const ir::DType dtype = input(node, 0).type.dtype;
  if (dtype == ir::DType::kInt32 || dtype == ir::DType::kInt64) return static_cast<int64_t>(value);
  return value;
}

void lower_gemm(const Node& node, CallList& calls) {
  Value *a = &input(node, 0), *b = &input(node, 1), *result = node.outputs[0];
  const Sides found = sides(node);
  if (ir::int_attr(node.attrs, "transA", 0) != 0) a = transposed(calls, a);
  if (ir::int_attr(node.attrs, "transB", 0) != 0) b = transposed(calls, b);
  const Arg alpha = factor(node, "alpha");
  if (has_input(node, 2)) {
    calls.add("aten::addmm", "", {node.inputs[2], a, b, factor(node, "beta"), alpha}, {result});
  } else if (ir::float_attr(node.attrs, "alpha", 1.0) == 1.0) {
    calls.add("aten::mm", "", {a, b}, {result});
  } else {
    Value* product = calls.temporary(with_shape(a->type, Shape{found.rows, found.columns}));
    calls.add("aten::mm", "", {a, b}, {product});
    calls.add("aten::mul", "Scalar", {product, alpha}, {result});
  }
}

bool is_one(const Arg& arg) {
  if (const auto* number = std::get_if<double>(&arg.value)) return *number == 1;
  const auto* dim = std::get_if<Dim>(&arg.value);
  return dim != nullptr && dim->is_constant() && dim->constant() == 1;
}

}  // namespace

bool multiplies_matrices(const Call& call) {
  return call.op == "aten::mm" || call.op == "aten::addmm";
}

std::optional<ProductArgs> find_product(const Call& call) {
  const bool is_plain = call.op == "aten::mm" || call.op == "aten::bmm";
  const bool is_added_to = call.op == "aten::addmm" || call.op == "aten::baddbmm";
  const size_t num_operands = is_added_to ? 3 : 2;
  if (!(is_plain || is_added_to) || !call.overload.empty() || call.outputs.size() != 1 ||
      call.outputs[0] == nullptr || call.args.size() < num_operands ||
      !std::all_of(call.args.begin() + num_operands, call.args.end(), is_one)) {
    return std::nullopt;
  }
  const auto operand = [&](size_t i) { return std::get<Value*>(call.args[i].value); };
  if (is_plain) return ProductArgs{operand(0), operand(1)};
  return ProductArgs{operand(1), operand(2), operand(0)};
}

std::optional<ProductArgs> find_wide_product(const Call& call) {
  if (call.op != "aten::mm" || call.overload != "dtype" || call.outputs.size() != 1 ||
      call.outputs[0] == nullptr) {
    return std::nullopt;
  }
  return ProductArgs{std::get<Value*>(call.args.at(0).value),
                     std::get<Value*>(call.args.at(1).value)};
}

Value* start_of(const Node& node) {
  const bool is_gemm = ir::is(&node, "Gemm") && ir::float_attr(node.attrs, "beta", 1) == 1;
  const int start = is_gemm ? 2 : kernel_facts(node).start;
  return start >= 0 && start < static_cast<int>(node.inputs.size()) ? node.inputs[start] : nullptr;
}

void register_matmul(Registry& ops) {
  Op matmul;
  matmul.name = "MatMul";
  matmul.min_inputs = matmul.max_inputs = 2;
  matmul.since = 9;
  matmul.infer = infer_matmul;
  for (const char* aten : {"aten::mm", "aten::bmm", "aten::mv", "aten::dot"}) {
    matmul.pairs.push_back({aten, is_summable});
  }
  matmul.lower = lower_matmul;
  ops.add(matmul);

  Op wide;
  wide.name = "WideMatMul";
  wide.domain = ir::kTorchOrtDomain;
  wide.min_inputs = wide.max_inputs = 2;
  wide.infer = infer_wide_matmul;
  wide.lower = lower_wide_matmul;
  ops.add(wide);

  Op matmul_add;
  matmul_add.name = "MatMulAdd";
  matmul_add.domain = ir::kTorchOrtDomain;
  matmul_add.min_inputs = 2;
  matmul_add.max_inputs = 3;
  matmul_add.infer = infer_matmul_add;
  matmul_add.lower = lower_matmul_add;
  matmul_add.kernel.start = 2;
  ops.add(matmul_add);

  Op gemm;
  gemm.name = "Gemm";
  gemm.min_inputs = 2;
  gemm.max_inputs = 3;
  gemm.attributes = {{"alpha", AttrKind::kFloat},
                     {"beta", AttrKind::kFloat},
                     {"transA", AttrKind::kInt},
                     {"transB", AttrKind::kInt}};
  gemm.since = 11;
  gemm.infer = infer_gemm;
  gemm.lower = lower_gemm;
  ops.add(gemm);
}

}  // namespace torch_ort::ops
