// Detects processes that were forked from one that had used CUDA: they have neither its contexts
// nor its threads.
#pragma once

namespace torch_ort::cuda {

// Notes that this process uses CUDA, or threads of this room.
void note_use();
bool was_forked();
// Throws DeviceError in a process that was forked from one that had used CUDA. Has to be called
// before any lock is taken, since a thread that does not exist here may hold the lock.
void check_not_forked();

}  // namespace torch_ort::cuda
