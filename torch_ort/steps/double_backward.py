"""Gradients of recorded graphs that can be differentiated again: create_graph=True.

The engine computes the gradients. If the program differentiates these, they are computed again from
the same inputs by a graph that can be differentiated (torch_ort/capture/second_graphs.py). Where
there is none, eager PyTorch runs the call again, and all later calls of the graph.

The gradients are then a function of the inputs of the call, which the node holds by weak references
(csrc/python/call_inputs.h), so that differentiating them gives what eager PyTorch computes from the
function itself. The joint graph cannot be used for this, since it has lost what `detach` and
`no_grad` cut off.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.core import autocast
from torch_ort.fallback import Failure, warn
from torch_ort.pytorch.autograd_compat import node_of_graph
from torch_ort.pytorch.patching import nothing_for_dynamo
from torch_ort.steps.again import (
    BATCHED,
    GONE,
    CallAgain,
    Function,
    Tensors,
    gradients_of,
    other_state,
)
from torch_ort.steps.runners import ForwardRunner
from torch_ort.steps.state import GraphState

_REASON = "gradients are differentiated again, which a captured graph cannot do (create_graph=True)"
_REFUSED = "torch_ort does not currently support double backward"
_FROM_NOW_ON = (
    "later calls of this graph run in eager PyTorch, which supports it: run the step again"
)
_BY_AOT = "AOTAutograd has captured it"

_keys = itertools.count(1)
_graphs: weakref.WeakValueDictionary[int, DoubleBackward] = weakref.WeakValueDictionary()


class Differentiable(Protocol):
    """Gives the gradients of calls by graphs that have a backward."""

    are_used: bool  # for gradients that the program has differentiated

    def change_since(self, inputs: Sequence[Any]) -> str:
        """Say what makes another function of what was recorded; empty if nothing does."""

    def may_serve(self, state: autocast.State) -> bool:
        """Tell whether gradients that are computed in a state of autocast may have a graph."""

    def gradients(
        self, inputs: Sequence[Any], tangents: Tensors, state: autocast.State
    ) -> list[torch.Tensor | None] | None:
        """Give the gradients of a call, with their history; None where no graph can.

        Graphs have to be allowed in the state, and what was recorded not to have changed.
        """


class DoubleBackward:
    """Differentiates the gradients of one recorded graph, for as long as this lives.

    `function` is what was recorded, as eager PyTorch runs it. It takes the flat inputs of a call,
    and raises Unsupported where it is another function by now.
    """

    def __init__(
        self, function: Function, again: CallAgain, second: Differentiable, state: GraphState
    ) -> None:
        self.key = next(_keys)
        self._function = function
        self._again = again
        self._second = second
        self._state = state
        _graphs[self.key] = self

    def differentiate(
        self, inputs: Sequence[Any] | None, tangents: Tensors, given: Tensors,
        state: autocast.State,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Give the gradients of a call's flat inputs, then those of its tangents.

        `given` are those of the gradients that it gave, in a `state` of autocast. Raises
        Unsupported where the call cannot be run again.
        """
        found = self._differentiate_by_graph(inputs, tangents, given, state)
        if found is not None:
            return found
        if self._state.options.strict:
            raise Unsupported(f"{_REFUSED}: {_REASON}")
        is_first = not self._state.is_differentiated_twice
        self._state.failed = self._state.is_differentiated_twice = True
        why = GONE if inputs is None else self._again.obstacle
        if why:
            raise Unsupported(f"{_REFUSED} of this call: {why}; {_FROM_NOW_ON}")
        gradients = self._run_again(inputs, tangents, given, state)
        if is_first:
            warn(Failure(Unsupported(_REASON), "backward"))
        return gradients

    def with_history(
        self, inputs: Sequence[Any], tangents: Tensors
    ) -> list[torch.Tensor | None] | None:
        """Give the gradients of a call where earlier ones were differentiated by a graph."""
        state = autocast.state_now()
        if not self._second.are_used or not self._second.may_serve(state):
            return None
        with torch.enable_grad():
            inputs = self._again.new_inputs(inputs)
            if self._second.change_since(inputs):
                return None
            return self._second.gradients(inputs, tangents, state)

    def _differentiate_by_graph(
        self, inputs: Sequence[Any] | None, tangents: Tensors, given: Tensors,
        state: autocast.State,
    ) -> list[torch.Tensor | None] | None:  # fmt: skip
        if inputs is None or not self._second.may_serve(state):
            return None
        keeps_history = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = self._again.new_inputs(inputs)
            why = self._second.change_since(inputs)
            if why:
                raise Unsupported(why)
            tangents = [None if each is None else each.view_as(each) for each in tangents]
            gradients = self._second.gradients(inputs, tangents, state)
        if gradients is None:
            return None
        return gradients_of(gradients, [*inputs, *tangents], given, keeps_history)

    def _run_again(
        self, inputs: Sequence[Any], tangents: Tensors, given: Tensors, state: autocast.State
    ) -> list[torch.Tensor | None]:
        keeps_history = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = self._again.new_inputs(inputs)
            tangents = [None if each is None else each.view_as(each) for each in tangents]
            with autocast.in_state(state):
                gradients = self._again.gradients(self._function, inputs, tangents, True)
        return gradients_of(gradients, [*inputs, *tangents], given, keeps_history)


class RefusingStep:
    """Runs a training graph that AOTAutograd has captured, whose node knows no inputs of the call.

    Where its gradients are differentiated, or backward() is called with a batch of gradients or in
    another autocast state than `states`, this raises, and it runs in eager PyTorch from then on.
    """

    def __init__(
        self, compiled: Callable[..., Any], state: GraphState, forward: ForwardRunner,
        states: Sequence[autocast.State],
    ) -> None:  # fmt: skip
        self._compiled = compiled
        self._state = state
        self._forward = forward
        self._states = states

    def __call__(self, *inputs: Any) -> Any:
        """Run forward."""
        results = self._compiled(*inputs)
        node = node_of_graph(results)
        self._forward.hold_call(node)
        if node is not None:
            node.register_prehook(self._check_state)
            node.register_hook(self._watch)
            self._forward.let_leave_early(results)
        return results

    def _check_state(self, given: Tensors) -> None:
        first = self._forward.first_backward
        is_watched = first is not None and not first.proven  # it runs the step again if it has to
        are_batched = not is_watched and _C.are_batched(given)
        if not are_batched and autocast.state_now() in self._states:
            return
        self._state.failed = not self._state.options.strict
        reason = BATCHED if are_batched else other_state(autocast.state_now())
        raise Unsupported(f"{reason}: {_BY_AOT}; {_FROM_NOW_ON}")

    def _watch(self, gradients: Tensors, tangents: Tensors) -> None:
        if not torch.is_grad_enabled():
            return
        nodes = {each.grad_fn for each in gradients if each is not None and each.grad_fn}
        for node in nodes:
            node.register_prehook(self._refuse)

    def _refuse(self, given: Tensors) -> None:
        if self._state.options.strict:
            raise Unsupported(f"{_REFUSED}: {_REASON}")
        self._state.failed = self._state.is_differentiated_twice = True
        raise Unsupported(f"{_REFUSED} of this call: {_BY_AOT}; {_FROM_NOW_ON}")


class _Gradients(torch.autograd.Function):
    """The gradients of one call, as a function of its inputs and tangents."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, compute: Callable[[], list[torch.Tensor | None]],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """Let the engine compute them."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(compute())

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Differentiate them."""
        return (None, None, *ctx.call.differentiate(ctx.saved_tensors, given))


class _Call(NamedTuple):
    """One call of a graph, but for its tensors."""

    key: int  # of the graph
    has_inputs: bool  # or they have been freed
    num_inputs: int
    leaves: list[Any]  # flat inputs, then tangents; None in the places of tensors
    places: list[int]  # of tensors
    state: autocast.State  # in which the gradients were computed

    @nothing_for_dynamo
    def differentiate(
        self, tensors: Sequence[torch.Tensor], given: Tensors
    ) -> list[torch.Tensor | None]:
        """Give the gradients of the tensors."""
        graph = _graphs.get(self.key)
        if graph is None:
            raise Unsupported(f"{_REFUSED} of this call: its compiled code was reset")
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        inputs = leaves[: self.num_inputs] if self.has_inputs else None
        found = graph.differentiate(inputs, leaves[self.num_inputs :], given, self.state)
        return [found[place] for place in self.places]


@nothing_for_dynamo
def _with_history(
    key: int, inputs: Sequence[Any] | None, tangents: Tensors,
    compute: Callable[[], list[torch.Tensor | None]],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Give what `compute` gives, so that it can be differentiated; called from autograd's node."""
    has_inputs = inputs is not None
    graph = _graphs.get(key)
    found = graph.with_history(inputs, tangents) if graph is not None and has_inputs else None
    if found is not None:
        return tuple(found)
    if not has_inputs:
        inputs = [torch.empty(0, requires_grad=True)]  # so that the gradients have a history
    leaves = [*inputs, *tangents]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None
    call = _Call(key, has_inputs, len(inputs), leaves, places, autocast.state_now())
    return _Gradients.apply(call, compute, *tensors)


_C.set_differentiable_gradients(_with_history)
