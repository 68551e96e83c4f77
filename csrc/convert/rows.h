// Guards and small steps that rows of several families share.
#pragma once

#include "convert/convert.h"

#include <optional>

namespace torch_ort::convert {

// Whether the pinned opset holds the registered standard op for values of this dtype.
bool can_use(const Builder& builder, std::string_view op, ir::DType dtype);
// Adds a registered standard op, if the pinned opset holds this form of it; empty otherwise.
// Whether the op takes the dtypes at all, the row must know.
std::vector<ir::Value*> standard(Builder& builder, std::string_view op,
                                 std::vector<ir::Value*> inputs, const std::vector<ir::Type>& types,
                                 ir::Attrs attrs = {});
// A reduction along axes: an input of the node, or an attribute where the opset is too old for
// that.
std::vector<ir::Value*> reduce(Builder& builder, std::string_view op, ir::Value* x,
                               const ir::Shape& axes, bool keeps_dims,
                               const std::vector<ir::Type>& types);

using ir::is_float;
// A dim or an integer that is no tensor. Nothing otherwise, None included.
std::optional<ir::Dim> dim(const ops::Arg& arg);
// The axis in the argument `name`, counted from the front of `rank` dims.
int64_t axis(const AtenCall& call, std::string_view name, size_t rank);
// Whether a tensor of this type leaves its kernel row-major, on strides as known.
bool is_row_major(const ir::Type& type);

}  // namespace torch_ort::convert
