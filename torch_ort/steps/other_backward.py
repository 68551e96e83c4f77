"""Backward of another kind than the one for which a graph's backward was recorded.

As in eager PyTorch, the state in which backward() is called decides what backward computes. A graph
is recorded for a backward without autocast. If that is another under the autocast that was around
forward, a second graph is recorded for it: the one that the last backward has asked for runs. In
other states, and for gradients that come in batches (`is_grads_batched=True`), eager PyTorch runs
the call again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.core import autocast
from torch_ort.fallback import Failure, warn, within_boundary
from torch_ort.pytorch.patching import nothing_for_dynamo
from torch_ort.steps.again import BATCHED, GONE, CallAgain, Function, Tensors, other_state
from torch_ort.steps.first_backward import Kept
from torch_ort.steps.state import GraphState

_NEXT_TIME = "later calls expect this: run the step again"

_graphs: weakref.WeakValueDictionary[int, OtherBackward] = weakref.WeakValueDictionary()


class OtherBackward:
    """Gives the gradients of calls of one recorded graph, for as long as this lives.

    `plain` is what was recorded, as eager PyTorch runs it. `step_for` gives the graph of the engine
    for a state of autocast, or None, and has later calls run it; `kept_call` gives what is
    remembered of a call.
    """

    def __init__(
        self, key: int, plain: Function, again: CallAgain,
        step_for: Callable[[autocast.State], Function | None],
        kept_call: Callable[[torch.Tensor], Kept | None], state: GraphState,
    ) -> None:  # fmt: skip
        self._plain = plain
        self._again = again
        self._step_for = step_for
        self._kept_call = kept_call
        self._state = state
        _graphs[key] = self

    def run(
        self, inputs: Sequence[Any] | None, token: torch.Tensor, tangents: Tensors,
        are_batched: bool,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Give the gradients of a call. Raises Unsupported where it cannot be run again."""
        now, kept = autocast.state_now(), self._kept_call(token)
        reason = BATCHED if are_batched else other_state(now)

        def in_engine() -> list[torch.Tensor | None]:
            step = None if are_batched else self._step_for(now)
            if step is None:
                raise Unsupported(reason)
            return self._run_again(step, kept, inputs, tangents, reason)

        def in_eager(failure: Failure) -> list[torch.Tensor | None]:
            if self._state.options.strict:
                raise failure.error
            self._state.failed = True
            gradients = self._run_again(self._plain, kept, inputs, tangents, reason)
            warn(failure)
            return gradients

        return within_boundary(in_engine, in_eager, "backward")

    def _run_again(
        self, function: Function, kept: Kept | None, inputs: Sequence[Any] | None,
        tangents: Tensors, reason: str,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        if kept is None:
            why = GONE if inputs is None else self._again.obstacle
            if why:
                raise Unsupported(f"{reason}, and the call cannot run again: {why}; {_NEXT_TIME}")
            return self._again.gradients(function, self._again.new_inputs(inputs), tangents, False)
        with kept.random.drawing_again():
            others = self._again.new_inputs(kept.inputs)
            return self._again.gradients(function, others, tangents, False)


@nothing_for_dynamo
def _backward(
    key: int, inputs: Sequence[Any] | None, token: torch.Tensor, tangents: Tensors,
    are_batched: bool,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Give the gradients of a call; called from autograd's node."""
    graph = _graphs.get(key)
    if graph is None:
        reason = BATCHED if are_batched else other_state(autocast.state_now())
        raise Unsupported(f"{reason}, and its compiled code was reset")
    return graph.run(inputs, token, tangents, are_batched)


_C.set_other_backward(_backward)
