// Puts numbers into device memory for kernels, for lists that are too long for arguments of a
// kernel.
//
// Kernels write the words from their own arguments. A copy from host memory would be read again
// when a captured CUDA graph is replayed.
#pragma once

#include "cuda/driver.h"
#include "cuda/stream.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::cuda {

constexpr int kMostWords = 480;  // per launch: an argument of nearly 4 KiB

// Returns the words in memory of the device of `write`, which is the kernel write_words of
// optimizer.cuh. They are for kernels on `stream`, which has to be the current stream. The most
// recent lists, at most 1 MiB in all, are kept there, and an equal list is not written again. While
// a stream is captured nothing is kept, and the CUDA graph writes its own words.
std::shared_ptr<const Scratch> words_on_device(const std::vector<uint64_t>& words,
                                               const Function& write, void* stream);

}  // namespace torch_ort::cuda
