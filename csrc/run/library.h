// The libraries of devices, as PyTorch calls them (region/library.h).
#pragma once

#include "region/library.h"

namespace torch_ort::run {

const region::Library& torch_library();

}  // namespace torch_ort::run
