#include "ops/formula.h"

namespace torch_ort::ops {

using ir::DType;
using ir::Shape;
using ir::Value;

DType computed_dtype(DType dtype) {
  return dtype == DType::kDouble ? DType::kDouble : DType::kFloat;
}

Formula::Formula(Writer& writer, DType dtype, Reader reader)
    : writer_(writer), dtype_(computed_dtype(dtype)), reader_(reader) {}

Value* Formula::number(Value* x) { return writer_.cast(x, dtype_); }

Value* Formula::constant(double number) { return writer_.scalar(number, dtype_); }

Value* Formula::make(std::string_view op, std::vector<Value*> inputs, ir::Attrs attrs) {
  return writer_.make(op, std::move(inputs), std::move(attrs));
}

Value* Formula::add(Value* a, Value* b) { return make("Add", {a, b}); }

Value* Formula::sub(Value* a, Value* b) { return make("Sub", {a, b}); }

Value* Formula::mul(Value* a, Value* b) { return make("Mul", {a, b}); }

Value* Formula::scaled(Value* x, double factor) { return mul(x, constant(factor)); }

Value* Formula::square(Value* x) { return mul(x, x); }

Value* Formula::reciprocal(Value* x) {
  Value*& made = reciprocals_[x];
  if (made == nullptr) made = make("Reciprocal", {x});
  return made;
}

Value* Formula::rsqrt(Value* x) { return reciprocal(make("Sqrt", {x})); }

Value* Formula::quotient(Value* x, Value* divisor) {
  if (reader_ == Reader::kFile) return make("Div", {x, divisor});
  return mul(x, reciprocal(divisor));
}

Value* Formula::max(Value* x, const Shape& axes) {
  return writer_.reduce("ReduceMax", x, axes, true);
}

Value* Formula::sum(Value* x, const Shape& axes) {
  return writer_.reduce("ReduceSum", x, axes, true);
}

Value* Formula::mean(Value* x, const Shape& axes) {
  return writer_.reduce("ReduceMean", x, axes, true);
}

Value* Formula::total(Value* x, const Shape& axes) {
  return writer_.reduce("ReduceSum", x, axes, false);
}

}  // namespace torch_ort::ops
