// What shape rules and lowerings of several families share: arithmetic on dims, axes, known
// numbers.
#pragma once

#include "ir/graph.h"
#include "ops/call.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch_ort::ops {

ir::Dim plus(const ir::Dim& a, const ir::Dim& b);
ir::Dim minus(const ir::Dim& a, const ir::Dim& b);
ir::Dim times(const ir::Dim& a, const ir::Dim& b);
ir::Dim floor_div(const ir::Dim& a, const ir::Dim& b);
ir::Dim ceil_div(const ir::Dim& a, const ir::Dim& b);

// The input in a slot. UserError if the node has none there.
ir::Value& input(const ir::Node& node, size_t slot);
bool has_input(const ir::Node& node, size_t slot);
// "cpu", "cuda:1": as dispatcher calls name the device of a type.
std::string device_name(const ir::Type& type);
// The data of an initializer, or of a Constant node; nullptr if there is none.
std::shared_ptr<const ir::TensorData> constant_data(const ir::Value& value);
// The shape of a value. Unsupported if it is known at run time only.
const ir::Shape& known_shape(const ir::Node& node, const ir::Value& value);
// The dims that a Shape node tells.
ir::Shape part_of_shape(const ir::Node& node);
// Dtype and device of `type` with another shape, row-major.
ir::Type with_shape(const ir::Type& type, std::optional<ir::Shape> shape);

// Strides of a tensor of known shape, whether its type names them or means row-major.
ir::Shape strides_of(const ir::Type& type);
// The type of a view: other sizes and strides over the memory of `base`.
ir::Type view_type(const ir::Type& base, ir::Shape shape, const ir::Shape& strides);
// The type of a view that repeats dims of one element, and has as many dims or more.
ir::Type expanded_type(const ir::Type& type, ir::Shape to);

// An axis counted from the front. UserError if there is no such axis.
int64_t wrap_axis(const ir::Node& node, int64_t axis, int64_t rank);
std::vector<int64_t> wrap_axes(const ir::Node& node, const ir::Shape& axes, int64_t rank);

// Dims of equal positions that must be equal: the more certain of the two. UserError on different
// constants.
ir::Dim same_dim(const ir::Node& node, const ir::Dim& a, const ir::Dim& b);

// The number that a constant of one element holds, as bool, integer or double; nothing if it is no
// such constant.
std::optional<Arg> known_number(const ir::Value* value);
// All numbers of a constant. Unsupported if the value comes from data.
std::vector<Arg> known_numbers(const ir::Node& node, const ir::Value& value);
// The number that a constant of any size holds in a place.
Arg element(const ir::TensorData& data, int64_t index);
// One number as a tensor without dims. Nothing if `dtype` does not hold it exactly; float32 rounds.
std::shared_ptr<const ir::TensorData> scalar_data(const Arg& number, ir::DType dtype);

}  // namespace torch_ort::ops
