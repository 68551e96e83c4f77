#pragma once

#include "ir/dim.h"

#include <optional>

namespace torch_ort::ops {

// The strides that a tensor has when it is viewed in another shape of as many elements; nothing if
// that takes a copy for some sizes.
std::optional<ir::Shape> viewed_strides(const ir::Shape& from, const ir::Shape& strides,
                                        const ir::Shape& to);

}  // namespace torch_ort::ops
