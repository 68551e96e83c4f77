// Reports a class label or an id that a kernel found to be out of bounds.
#pragma once

#include <string>

namespace torch_ort::cuda {

[[noreturn]] void raise_index_error(const std::string& message);  // throws Python's IndexError

}  // namespace torch_ort::cuda
