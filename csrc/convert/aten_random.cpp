// Random calls: dropout while training. Others draw from the device's generator as ATen nodes.

#include "convert/families.h"
#include "convert/rows.h"

namespace torch_ort::convert {

namespace {

std::vector<ir::Value*> native_dropout(Builder& builder, const AtenCall& call) {
  ir::Value* x = tensor(call.arg("input"));
  const ops::Arg &ratio = call.arg("p"), &train = call.arg("train");
  if (x == nullptr || !is_float(x->type.dtype) || !can_use(builder, "Dropout", x->type.dtype))
    return {};
  if (!is_number(ratio) || train.is_none() || !boolean(train)) return {};
  const double p = number(ratio);
  // ONNX requires a ratio below 1.
  if (p < 0 || p >= 1) return {};
  return builder.node(
      "Dropout", {x, builder.scalar(p, ir::DType::kDouble), builder.scalar(1, ir::DType::kBool)},
      call.types);
}

}  // namespace

void add_random(Table& table) { table.add("aten::native_dropout", native_dropout); }

}  // namespace torch_ort::convert
