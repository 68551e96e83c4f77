#pragma once

#include "ir/dim.h"

#include <optional>

namespace torch_ort::ops {

// Strides of a strided tensor seen in another shape of as many elements; nothing if it takes a copy
// for some sizes.
std::optional<ir::Shape> viewed_strides(const ir::Shape& from, const ir::Shape& strides,
                                        const ir::Shape& to);

}  // namespace torch_ort::ops
