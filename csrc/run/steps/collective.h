// Communication between ranks: a step that starts it, and one that waits for a result.
//
// PyTorch's process group does it in threads or on streams of its own, and holds references to the
// tensors that it reads and writes. A reference keeps memory of PyTorch's from being freed, but not
// memory of the engine from being used again. Operands may be in memory of the engine: the wait
// reads them too, so that the plan keeps them as they are until then.
//
// The result of an operator that has a form in place is in planned memory: where its operand is if
// nothing else reads that. What is waited for is a view of it. Other results have memory of
// PyTorch's, as all have that the caller waits for, or that leave the forward half of a training
// graph.
#pragma once

namespace torch_ort::run {

struct Context;

// Waits for all that is in flight in a run that has failed, whose memory others may use from then
// on. An error of the communication itself is dropped: the run raises the first one.
void wait_for_all(Context& context) noexcept;

}  // namespace torch_ort::run
