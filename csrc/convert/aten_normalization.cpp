// Normalization by statistics of rows, groups of channels, or whole batches.

#include "convert/families.h"
#include "convert/rows.h"
#include "ops/aten_names.h"

#include <algorithm>

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::DType;
using ir::Shape;
using ir::Value;
using Values = std::vector<Value*>;

// Whether all tensors are given and have the dtype of the first. ONNX specifies statistics in
// float32, to which kernels for float64 do not round.
bool have_one_dtype(const Values& values) {
  return std::all_of(values.begin(), values.end(), [&](const Value* value) {
    return value != nullptr && value->type.shape && is_float(value->type.dtype) &&
           value->type.dtype == values[0]->type.dtype;
  });
}

bool is_double(const Value* x) { return x->type.dtype == DType::kDouble; }

// The first of the dims that are normalized; nothing if there are none.
std::optional<int64_t> first_axis(const AtenCall& call, const Value* x) {
  const size_t count = dims(call.arg("normalized_shape")).size();
  if (count == 0 || count > x->type.shape->size()) return std::nullopt;
  return static_cast<int64_t>(x->type.shape->size() - count);
}

Values layer_norm(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("input")), *scale = tensor(call.arg("weight"));
  Value* bias = tensor(call.arg("bias"));
  if (!have_one_dtype({x, scale}) || is_double(x)) return {};
  if (bias != nullptr && !have_one_dtype({x, bias})) return {};
  const bool wants_statistics = call.used[1] || call.used[2];
  if (wants_statistics && call.types[1].dtype != DType::kFloat) return {};
  const std::optional<int64_t> at = first_axis(call, x);
  if (!at) return {};

  Values inputs = {x, scale};
  if (bias != nullptr) inputs.push_back(bias);
  std::vector<ir::Type> types = call.types;
  if (!wants_statistics) types.resize(1);
  Values outputs = standard(builder, "LayerNormalization", inputs, types,
                            {{"axis", Dim(*at)}, {"epsilon", number(call.arg("eps"))}});
  if (!outputs.empty()) outputs.resize(call.types.size(), nullptr);
  return outputs;
}

Values rms_norm(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("input")), *scale = tensor(call.arg("weight"));
  // Without a number PyTorch uses the machine epsilon of the dtype.
  if (!have_one_dtype({x, scale}) || is_double(x) || !is_number(call.arg("eps"))) return {};
  const std::optional<int64_t> at = first_axis(call, x);
  if (call.used[1] || !at) return {};
  Values outputs = standard(builder, "RMSNormalization", {x, scale}, {call.types[0]},
                            {{"axis", Dim(*at)}, {"epsilon", number(call.arg("eps"))}});
  if (!outputs.empty()) outputs.push_back(nullptr);
  return outputs;
}

Values group_norm(Builder& builder, const AtenCall& call) {
  const Values inputs = {tensor(call.arg("input")), tensor(call.arg("weight")),
                         tensor(call.arg("bias"))};
  if (!have_one_dtype(inputs) || is_double(inputs[0])) return {};
  if (call.used[1] || call.used[2] || inputs[0]->type.shape->size() < 3) return {};
  Values outputs = standard(
      builder, "GroupNormalization", inputs, {call.types[0]},
      {{"num_groups", Dim(integer(call.arg("group")))}, {"epsilon", number(call.arg("eps"))}});
  if (!outputs.empty()) outputs.resize(3, nullptr);
  return outputs;
}

Values batch_norm(Builder& builder, const AtenCall& call) {
  const Values inputs = {tensor(call.arg("input")), tensor(call.arg("weight")),
                         tensor(call.arg("bias")), tensor(call.arg("running_mean")),
                         tensor(call.arg("running_var"))};
  if (!have_one_dtype(inputs) || call.used[1] || call.used[2]) return {};
  if (inputs[0]->type.shape->size() < 2) return {};
  Values outputs = standard(builder, "BatchNormalization", inputs, {call.types[0]},
                            {{"epsilon", number(call.arg("eps"))}});
  if (!outputs.empty()) outputs.resize(3, nullptr);
  return outputs;
}

// The operator that traces below autograd contain.
Values native_batch_norm(Builder& builder, const AtenCall& call) {
  return boolean(call.arg("training")) ? Values() : batch_norm(builder, call);
}

}  // namespace

void add_normalization(Table& table) {
  table.add(ops::aten::kRmsNorm, rms_norm);
  table.add("aten::_native_batch_norm_legit_no_training", batch_norm);
  table.add("aten::native_batch_norm", native_batch_norm);
  table.add("aten::native_group_norm", group_norm);
  table.add("aten::native_layer_norm", layer_norm);
}

}  // namespace torch_ort::convert
