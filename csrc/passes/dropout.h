// What a Dropout node says.
#pragma once

#include "ir/graph.h"

#include <optional>

namespace torch_ort::passes {

// The ratio of a Dropout that is in training mode; nothing for other nodes, or if the ratio is not
// a constant between 0 and 1.
std::optional<double> dropout_ratio(const ir::Node& node);

}  // namespace torch_ort::passes
