// Work on PyTorch's threads: at::parallel_for for any compiler.
//
// at::parallel_for is inlined, and begins with a pragma of OpenMP. GCC compiles it to a call of
// libgomp, which is the runtime that torch loads. Clang compiles it to calls of a runtime of its
// own, whose threads would fight with torch's over the cores, and know nothing of
// torch.set_num_threads. So parallel.cpp calls libgomp itself, and no file needs a compiler's
// OpenMP.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace torch_ort::cpu {

// Calls `work` with parts of the range from `begin` to `end`, which together are the whole: at most
// as many as there are threads, and one for each `grain` items, a part that is begun included. Each
// has a thread of its own. Inside of such a part, and where there is one thread, the whole is one
// part. An error of a part is thrown when all have ended. Tensors must not be used in `work`:
// threads do not have the caller's state.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> work);

// The most threads that parallel_for starts: those of torch.get_num_threads().
int num_threads();

}  // namespace torch_ort::cpu
