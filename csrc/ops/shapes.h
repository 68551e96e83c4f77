// What the shape rules and lowerings of several families share: arithmetic on dims, axes, and
// constant values.
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

// The input in a slot. Throws UserError if the node has none there.
ir::Value& input(const ir::Node& node, size_t slot);
bool has_input(const ir::Node& node, size_t slot);
// The device of a type as arguments of calls name it: "cpu", "cuda:1".
std::string device_name(const ir::Type& type);
// The data of an initializer or of a Constant node; nullptr if the value is neither.
std::shared_ptr<const ir::TensorData> constant_data(const ir::Value& value);
// The shape of a value. Throws Unsupported if it is known only at run time.
const ir::Shape& known_shape(const ir::Node& node, const ir::Value& value);
// The number of dims of a value whose shape is known.
inline int64_t rank_of(const ir::Value& value) {
  return static_cast<int64_t>(value.type.shape->size());
}
// The dims that a Shape node returns.
ir::Shape part_of_shape(const ir::Node& node);
// The dtype and device of `type` with another shape, row-major.
ir::Type with_shape(const ir::Type& type, std::optional<ir::Shape> shape);
// A rule of types: one result with the dtype and shape of the first input, row-major.
std::vector<ir::Type> infer_like_first(const ir::Node& node);

// The strides of a tensor of known shape; row-major ones if its type names none.
ir::Shape strides_of(const ir::Type& type);
// Whether several elements are in one place of memory, as those of an expanded tensor.
bool repeats_elements(const ir::Type& type);
// The type of a view: other sizes and strides over the memory of `base`.
ir::Type view_type(const ir::Type& base, ir::Shape shape, const ir::Shape& strides);
// The type of an expanded view: dims of one element are repeated, and new dims are added in front.
ir::Type expanded_type(const ir::Type& type, ir::Shape to);

// The axis counted from the front. Throws UserError if there is no such axis.
int64_t wrap_axis(const ir::Node& node, int64_t axis, int64_t rank);
std::vector<int64_t> wrap_axes(const ir::Node& node, const ir::Shape& axes, int64_t rank);

// Of two dims that must be equal, the one that is known better: a constant rather than an
// expression. Throws UserError on different constants.
ir::Dim same_dim(const ir::Node& node, const ir::Dim& a, const ir::Dim& b);

// The number in a constant of one element, as bool, integer or double; nothing if the value is no
// such constant.
std::optional<Arg> known_number(const ir::Value* value);
// All numbers of a constant. Throws Unsupported if the value depends on data.
std::vector<Arg> known_numbers(const ir::Node& node, const ir::Value& value);
// The number at an index of a constant.
Arg element(const ir::TensorData& data, int64_t index);
// One number as a 0-d tensor; nullptr if `dtype` cannot represent it exactly. float32 is the
// exception: it rounds.
std::shared_ptr<const ir::TensorData> scalar_data(const Arg& number, ir::DType dtype);

}  // namespace torch_ort::ops
