// A process that is forked from one that has used CUDA has neither its contexts nor its threads.
#pragma once

namespace torch_ort::cuda {

// From now on this process uses CUDA, or threads of this room.
void note_use();
bool was_forked();
// DeviceError in a process that was forked from one that had used CUDA. Called before any lock is
// taken: a thread that is not here may have held it.
void check_not_forked();

}  // namespace torch_ort::cuda
