// Convolutions, pooling and resizing.

#include "convert/families.h"
#include "convert/rows.h"

#include <algorithm>

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::Shape;
using ir::Value;
using Values = std::vector<Value*>;

// Whether x is a batch of images or volumes with a dtype that `op` supports.
bool is_batch(const Builder& builder, const Value* x, std::string_view op, size_t rank) {
  return x != nullptr && x->type.shape && x->type.shape->size() == rank &&
         is_float(x->type.dtype) && can_use(builder, op, x->type.dtype);
}

// The numbers of an argument, one for each dim. A single number stands for all dims, and none for
// `missing`. Empty if a number is not constant.
Shape per_dim(const ops::Arg& arg, size_t rank, const Shape& missing) {
  Shape numbers = dims(arg);
  if (!ir::is_constant(numbers)) return {};
  if (numbers.empty()) return missing;
  if (numbers.size() == 1) numbers.assign(rank, numbers[0]);
  return numbers.size() == rank ? numbers : Shape();
}

// The padding of both sides, which is equal, in the order of ONNX.
Shape both_sides(const Shape& padding) {
  Shape pads = padding;
  pads.insert(pads.end(), padding.begin(), padding.end());
  return pads;
}

Values convolution(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("input")), *weight = tensor(call.arg("weight"));
  Value* bias = tensor(call.arg("bias"));
  const bool is_transposed = boolean(call.arg("transposed"));
  const char* op = is_transposed ? "ConvTranspose" : "Conv";
  if (weight == nullptr || !weight->type.shape || weight->type.shape->size() < 3) return {};
  const size_t rank = weight->type.shape->size() - 2;
  if (!is_batch(builder, x, op, rank + 2) || weight->type.dtype != x->type.dtype) return {};
  if (bias != nullptr && bias->type.dtype != x->type.dtype) return {};

  const Shape kernel(weight->type.shape->begin() + 2, weight->type.shape->end());
  const Shape strides = per_dim(call.arg("stride"), rank, {});
  const Shape padding = per_dim(call.arg("padding"), rank, {});
  const Shape dilations = per_dim(call.arg("dilation"), rank, {});
  if (!ir::is_constant(kernel) || strides.empty() || padding.empty() || dilations.empty())
    return {};
  ir::Attrs attrs = {{"kernel_shape", kernel},
                     {"strides", strides},
                     {"pads", both_sides(padding)},
                     {"dilations", dilations},
                     {"group", Dim(integer(call.arg("groups")))}};
  if (is_transposed) {
    const Shape extra = per_dim(call.arg("output_padding"), rank, Shape(rank, Dim(0)));
    if (extra.empty()) return {};
    attrs["output_padding"] = extra;
  }
  Values inputs = {x, weight};
  if (bias != nullptr) inputs.push_back(bias);
  return builder.node(op, inputs, call.types, std::move(attrs));
}

// The attributes that max and average pooling share; empty if there is no standard node.
ir::Attrs pool_attrs(const AtenCall& call, size_t rank) {
  const Shape kernel = per_dim(call.arg("kernel_size"), rank, {});
  const Shape strides = per_dim(call.arg("stride"), rank, kernel);
  const Shape padding = per_dim(call.arg("padding"), rank, {});
  // ONNX and PyTorch round up the number of positions by different rules.
  if (kernel.empty() || strides.empty() || padding.empty() || boolean(call.arg("ceil_mode")))
    return {};
  return {{"kernel_shape", kernel}, {"strides", strides}, {"pads", both_sides(padding)}};
}

template <size_t kRank>
Values max_pool(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  // PyTorch's indices count within one plane, those of ONNX over the whole tensor.
  if (call.used[1] || !is_batch(builder, x, "MaxPool", kRank + 2)) return {};
  ir::Attrs attrs = pool_attrs(call, kRank);
  const Shape dilations = per_dim(call.arg("dilation"), kRank, {});
  if (attrs.empty() || dilations.empty()) return {};
  attrs["dilations"] = dilations;
  return {builder.node1("MaxPool", {x}, call.types[0], std::move(attrs)), nullptr};
}

template <size_t kRank>
Values average_pool(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (!call.arg("divisor_override").is_none() || !is_batch(builder, x, "AveragePool", kRank + 2))
    return {};
  ir::Attrs attrs = pool_attrs(call, kRank);
  if (attrs.empty()) return {};
  attrs["count_include_pad"] = Dim(boolean(call.arg("count_include_pad")) ? 1 : 0);
  return builder.node("AveragePool", {x}, call.types, std::move(attrs));
}

bool is_power_of_two(int64_t number) { return number > 0 && (number & (number - 1)) == 0; }

// ONNX and PyTorch compute the same positions exactly only if sizes grow by a power of two.
bool grows_exactly(const Shape& from, const Shape& to) {
  if (!ir::is_constant(from) || !ir::is_constant(to) || from.size() != to.size()) return false;
  for (size_t i = 0; i < from.size(); ++i) {
    const int64_t size = from[i].constant(), grown = to[i].constant();
    if (size == 0 || grown % size != 0 || !is_power_of_two(grown / size)) return false;
  }
  return true;
}

// Whether the caller gave other factors than those that follow from the sizes.
bool names_other_factors(const AtenCall& call, const Shape& from, const Shape& to) {
  for (size_t i = 0; i < call.arg_names.size(); ++i) {
    if (!call.arg_names[i].starts_with("scales") || call.args[i].is_none()) continue;
    const char last = call.arg_names[i].back();
    const size_t rank = from.size();
    const size_t at = last == 'd' ? 0 : last == 'h' ? rank - 2 : rank - 1;
    if (!is_number(call.args[i])) return true;
    const auto factor = static_cast<double>(to[at].constant() / from[at].constant());
    if (number(call.args[i]) != factor) return true;
  }
  return false;
}

template <size_t kRank, bool kLinear>
Values upsample(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (!is_batch(builder, x, "Resize", kRank + 2) || !call.types[0].shape) return {};
  if (kLinear && boolean(call.arg("align_corners"))) return {};
  const Shape& full = *call.types[0].shape;
  const Shape from(x->type.shape->begin() + 2, x->type.shape->end());
  const Shape to(full.begin() + 2, full.end());
  if (!grows_exactly(from, to) || names_other_factors(call, from, to)) return {};
  ir::Attrs attrs;
  if (kLinear) {
    attrs = {{"mode", "linear"}, {"coordinate_transformation_mode", "half_pixel"}};
  } else {
    attrs = {{"mode", "nearest"},
             {"coordinate_transformation_mode", "asymmetric"},
             {"nearest_mode", "floor"}};
  }
  return builder.node("Resize", {x, nullptr, nullptr, builder.ints(full)}, call.types,
                      std::move(attrs));
}

}  // namespace

void add_convolution(Table& table) {
  table.add("aten::convolution", convolution);
  table.add("aten::max_pool2d_with_indices", max_pool<2>);
  table.add("aten::max_pool3d_with_indices", max_pool<3>);
  table.add("aten::avg_pool2d", average_pool<2>);
  table.add("aten::avg_pool3d", average_pool<3>);
  table.add("aten::upsample_nearest1d", upsample<1, false>);
  table.add("aten::upsample_nearest2d", upsample<2, false>);
  table.add("aten::upsample_nearest3d", upsample<3, false>);
  table.add("aten::upsample_linear1d", upsample<1, true>);
  table.add("aten::upsample_bilinear2d", upsample<2, true>);
  table.add("aten::upsample_trilinear3d", upsample<3, true>);
}

}  // namespace torch_ort::convert
