// Runs the blocks of a launch, thread by thread.
#pragma once

#include "block.h"

#include <cstddef>
#include <functional>

namespace emulated {

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  std::function<void()> kernel;
};

// Runs all blocks, one after the other. EMULATED_CUDA_ORDER is the order of blocks and threads:
//   forward          each thread in turn goes on to where it has to wait (where nothing is said)
//   reverse          the same from the last one
//   greedy           a warp goes on as far as it gets before another moves: shows who writes what
//   others still read greedy-reverse   the same from the last one random:<seed>    threads and
//   blocks shuffled
// Shared memory begins full of NaN and ends at a page that nobody may touch.
// Raises std::runtime_error where threads wait for what never comes, or for different things.
void run(const Launch& launch);

}  // namespace emulated
