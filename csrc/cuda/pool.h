// A few threads that do work in advance. Nobody depends on them: a caller that needs a result
// earlier computes it itself.
#pragma once

#include <functional>

namespace torch_ort::cuda {

// Runs a job on a thread of the pool; the threads start with the first job. Exceptions of a job are
// dropped, because a caller that does the same work gets them.
void work_on(const std::function<void()>& job);
// Drops jobs that have not begun, waits for those that have, and accepts no more. Called before the
// process ends, since the libraries that jobs use are destroyed then.
void stop_working();

}  // namespace torch_ort::cuda
