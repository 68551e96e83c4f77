// Matrix products.

#include "convert/families.h"
#include "convert/rows.h"

namespace torch_ort::convert {

namespace {

using ir::DType;
using ir::Value;
using Values = std::vector<Value*>;

bool is_factor(const Value* x) {
  if (x == nullptr || !x->type.shape) return false;
  const DType dtype = x->type.dtype;
  return is_float(dtype) || dtype == DType::kInt32 || dtype == DType::kInt64;
}

Values product(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.args.at(0)), *y = tensor(call.args.at(1));
  if (!is_factor(x) || !is_factor(y) || x->type.dtype != y->type.dtype) return {};
  if (call.types[0].dtype != x->type.dtype) return {};
  return standard(builder, "MatMul", {x, y}, call.types);
}

Values addmm(Builder& builder, const AtenCall& call) {
  Value *bias = tensor(call.arg("self")), *x = tensor(call.arg("mat1")),
        *y = tensor(call.arg("mat2"));
  if (!is_factor(x) || !is_factor(y) || !is_factor(bias) || !is_float(x->type.dtype)) return {};
  if (x->type.dtype != y->type.dtype || x->type.dtype != bias->type.dtype) return {};
  const ops::Arg &alpha = call.arg("alpha"), &beta = call.arg("beta");
  // With beta 0 PyTorch does not read the bias, whereas ONNX multiplies it, including NaN.
  if (!is_number(alpha) || !is_number(beta) || number(beta) == 0.0) return {};
  ir::Attrs attrs;
  if (number(alpha) != 1.0) attrs["alpha"] = number(alpha);
  if (number(beta) != 1.0) attrs["beta"] = number(beta);
  return standard(builder, "Gemm", {x, y, bias}, call.types, std::move(attrs));
}

}  // namespace

void add_matmul(Table& table) {
  table.add("aten::mm", product);
  table.add("aten::bmm", product);
  table.add("aten::mv", product);
  table.add("aten::dot", product);
  table.add("aten::addmm", addmm);
}

}  // namespace torch_ort::convert
