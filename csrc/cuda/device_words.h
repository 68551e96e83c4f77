// Numbers that kernels read from memory of a device, for lists that are too long for arguments.
#pragma once

#include "cuda/driver.h"
#include "cuda/stream.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::cuda {

constexpr int kMostWords = 480;  // that a launch brings: an argument of nearly 4 KiB

// The words in memory of the device of `write`, the kernel write_words of optimizer.cuh, for
// kernels of a stream, the one in force. The last lists, together 1 MiB at most, are kept there:
// one that is asked for again is not written again. While a stream is captured nothing is kept, and
// the graph writes its own.
std::shared_ptr<const Scratch> words_on_device(const std::vector<uint64_t>& words,
                                               const Function& write, void* stream);

}  // namespace torch_ort::cuda
