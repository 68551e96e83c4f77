// A few threads that work on what others will ask for. Nobody depends on them: whoever needs a
// result first makes it himself.
#pragma once

#include <functional>

namespace torch_ort::cuda {

// Runs a job on a thread of the pool; the threads start with the first job. What it throws is
// dropped: who makes the same himself is told.
void work_on(const std::function<void()>& job);
// Forgets jobs that have not begun, waits for those that have, and takes no more. Called before the
// process ends, since the libraries that jobs use are taken down then.
void stop_working();

}  // namespace torch_ort::cuda
