// A matrix product that is added to a tensor; others are pairs (ops/pair.h).

#include "convert/families.h"
#include "convert/rows.h"

namespace torch_ort::convert {

namespace {

using ir::Value;
using Values = std::vector<Value*>;

bool is_factor(const Value* x) { return x != nullptr && x->type.shape && is_float(x->type.dtype); }

Values addmm(Builder& builder, const AtenCall& call) {
  Value *bias = tensor(call.arg("self")), *x = tensor(call.arg("mat1")),
        *y = tensor(call.arg("mat2"));
  if (!is_factor(x) || !is_factor(y) || !is_factor(bias)) return {};
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

void add_matmul(Table& table) { table.add("aten::addmm", addmm); }

}  // namespace torch_ort::convert
