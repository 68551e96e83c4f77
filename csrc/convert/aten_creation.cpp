// Tensors made from numbers, on the CPU: ONNX has no word for another device.

#include "convert/families.h"
#include "convert/rows.h"
#include "ops/shapes.h"

namespace torch_ort::convert {

namespace {

using ir::DType;
using ir::Type;
using ir::Value;
using Values = std::vector<Value*>;

bool is_plain_cpu(const AtenCall& call) {
  const Type& type = call.types[0];
  if (!type.is_known() || type.device.kind != "cpu" || !is_row_major(type)) return false;
  const ops::Arg& pinned = call.arg("pin_memory");
  return text(call.arg("layout"), "strided") == "strided" && (pinned.is_none() || !boolean(pinned));
}

Values filled(Builder& builder, const AtenCall& call, const ops::Arg& number) {
  if (!is_plain_cpu(call) || !is_number(number)) return {};
  const Type& type = call.types[0];
  if (!can_use(builder, "ConstantOfShape", type.dtype)) return {};
  const auto scalar = ops::scalar_data(number, type.dtype);
  if (scalar == nullptr) return {};
  std::vector<std::byte> bytes(scalar->bytes, scalar->bytes + scalar->num_bytes);
  return builder.node("ConstantOfShape", {builder.ints(*type.shape)}, {type},
                      {{"value", ir::make_tensor_data(type.dtype, {1}, std::move(bytes))}});
}

Values full(Builder& builder, const AtenCall& call) {
  return filled(builder, call, call.arg("fill_value"));
}
Values scalar_tensor(Builder& builder, const AtenCall& call) {
  return filled(builder, call, call.arg("s"));
}
Values zeros(Builder& builder, const AtenCall& call) { return filled(builder, call, 0); }
Values ones(Builder& builder, const AtenCall& call) { return filled(builder, call, 1); }

Values range(Builder& builder, const AtenCall& call, const ops::Arg& start, const ops::Arg& step) {
  const Type& type = call.types[0];
  // Floating-point ranges are rounded differently in ONNX and PyTorch.
  const bool is_integer =
      type.dtype == DType::kInt64 || type.dtype == DType::kInt32 || type.dtype == DType::kInt16;
  if (!is_plain_cpu(call) || !is_integer || !can_use(builder, "Range", type.dtype)) return {};
  Values inputs;
  for (const ops::Arg* bound : {&start, &call.arg("end"), &step}) {
    const std::optional<ir::Dim> known = dim(*bound);
    if (!known || !known->is_constant()) return {};
    inputs.push_back(builder.scalar(static_cast<double>(known->constant()), type.dtype));
    if (inputs.back() == nullptr) return {};
  }
  return builder.node("Range", inputs, {type});
}

Values arange(Builder& builder, const AtenCall& call) { return range(builder, call, 0, 1); }
Values arange_from(Builder& builder, const AtenCall& call) {
  return range(builder, call, call.arg("start"), 1);
}
Values arange_by(Builder& builder, const AtenCall& call) {
  return range(builder, call, call.arg("start"), call.arg("step"));
}

}  // namespace

void add_creation(Table& table) {
  table.add("aten::full", full);
  table.add("aten::full_like", full);
  table.add("aten::new_full", full);
  table.add("aten::scalar_tensor", scalar_tensor);
  table.add("aten::zeros", zeros);
  table.add("aten::zeros_like", zeros);
  table.add("aten::new_zeros", zeros);
  table.add("aten::ones", ones);
  table.add("aten::ones_like", ones);
  table.add("aten::new_ones", ones);
  table.add("aten::arange", arange);
  table.add("aten::arange.start", arange_from);
  table.add("aten::arange.start_step", arange_by);
}

}  // namespace torch_ort::convert
