"""Gradients of gradients in the engine: the gradients of a recorded graph as graphs of their own.

Such a graph computes the gradients of a call from its inputs and tangents, and has a backward like
any other. It is recorded when a program first differentiates gradients, by running the function and
its backward once more, so that it is what eager PyTorch would differentiate.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ort.capture.graphs import GraphCompiler
from torch_ort.capture.module_function import PlainCall
from torch_ort.core import autocast
from torch_ort.functions.describe import is_python_op
from torch_ort.guards.structure import is_dense
from torch_ort.record.reasons import is_reason_to_hand_over, log_hand_over
from torch_ort.record.recorder import RecordedInputs, Recording
from torch_ort.steps.again import CallAgain, Function, Tensors
from torch_ort.steps.recorded import RecordedStep
from torch_ort.steps.state import GraphState

# Records and compiles a function of flat inputs, which the last argument computes in eager PyTorch.
Compile = Callable[[GraphCompiler, Function, Sequence[Any], Function], Function]

# A graph serves calls of one set of sizes. Calls of further ones run in eager PyTorch.
_MOST_GRAPHS = 16


class SecondGraphs:
    """The gradients of calls of one recorded graph, in a form that can be differentiated.

    `plain` is what was recorded, as eager PyTorch runs it.
    """

    def __init__(
        self, recording: Recording, plain: Function, again: CallAgain, compile_graph: Compile,
        state: GraphState,
    ) -> None:  # fmt: skip
        self._plain = plain
        self._again = again
        self._compile_graph = compile_graph
        self._state = state
        targets = [node.target for node in recording.module.graph.nodes]
        # Of what Python computes it is not known whether it may run while it is recorded.
        self._is_possible = not again.obstacle and not any(map(is_python_op, targets))
        self._graphs: dict[tuple, _SecondGraph | None] = {}  # by the forms of inputs and tangents
        self._hold_inputs: Callable[[], Callable[[], None] | None] = lambda: None
        self._lock = threading.Lock()

    def when_used(self, hold_inputs: weakref.WeakMethod) -> None:
        """Set what lets later calls hold their inputs, which gradients are computed from."""
        self._hold_inputs = hold_inputs

    @property
    def are_used(self) -> bool:
        """Tell whether gradients of calls have been differentiated by a graph."""
        return any(self._graphs.values())

    def change_since(self, inputs: Sequence[Any]) -> str:
        """Say what makes another function of what was recorded; empty if nothing does."""
        if not isinstance(self._plain, PlainCall | PlainGradients):
            return ""
        with self._again.as_called():
            return self._plain.change_since(*inputs)

    def may_serve(self, state: autocast.State) -> bool:
        """Tell whether gradients that are computed in a state of autocast may have a graph."""
        is_alone = not self._state.communicates  # or other ranks would have to compute it too
        is_plain = not state and self._again.is_without_autocast
        return self._is_possible and is_alone and is_plain

    def gradients(
        self, inputs: Sequence[Any], tangents: Tensors, state: autocast.State
    ) -> list[torch.Tensor | None] | None:
        """Give the gradients of a call, with their history; None where no graph can.

        Graphs have to be allowed in the state, and what was recorded not to have changed.
        """
        flat = [_dense(value) for value in (*inputs, *tangents)]
        with autocast.in_state(state):  # another one may be active by now
            graph = self._graph_for(flat, len(inputs))
            return None if graph is None or graph.state.failed else graph.run(flat)

    def _graph_for(self, flat: Sequence[Any], num_inputs: int) -> _SecondGraph | None:
        form = tuple(map(_form_of, flat))
        with self._lock:
            if form not in self._graphs:
                if len(self._graphs) >= _MOST_GRAPHS:
                    return None
                self._graphs[form] = self._capture(flat, num_inputs)
            return self._graphs[form]

    def _capture(self, flat: Sequence[Any], num_inputs: int) -> _SecondGraph | None:
        state = GraphState(self._state.options, communicates=self._state.communicates)
        try:
            graph = _SecondGraph(
                self._plain, self._again, self._compile_graph, state, flat, num_inputs
            )
        except Exception as error:
            is_bug = not is_reason_to_hand_over(error)
            if is_bug and state.options.strict:
                raise
            log_hand_over(error, is_bug)
            return None
        hold_inputs = self._hold_inputs()
        if hold_inputs is not None:
            hold_inputs()
        return graph


class _SecondGraph:
    """A graph for calls of one form."""

    def __init__(
        self, plain: Function, again: CallAgain, compile_graph: Compile, state: GraphState,
        flat: Sequence[Any], num_inputs: int,
    ) -> None:  # fmt: skip
        self.state = state
        self._places = [i for i, value in enumerate(flat) if value is not None]
        self._gradients = PlainGradients(plain, again, self._places, num_inputs, len(flat))
        fixed = RecordedInputs(are_fixed=True)
        leaves = [
            fixed.tensor(value, f"input_{i}") if isinstance(value, torch.Tensor) else value
            for i, value in enumerate(flat)
            if value is not None
        ]
        with fixed.tracing(), torch.enable_grad():
            self._run = compile_graph(
                GraphCompiler(state), self._gradients.unchecked, leaves, self._gradients
            )
        if isinstance(self._run, RecordedStep):
            self._run.hold_inputs()  # nobody else does

    def run(self, flat: Sequence[Any]) -> list[torch.Tensor | None]:
        """Give the gradients of a call."""
        with torch.enable_grad():
            found = self._run(*(flat[i] for i in self._places))
        return self._gradients.placed(found)


class PlainGradients:
    """The gradients of calls as eager PyTorch computes them, without those that there are not.

    A call takes the inputs and tangents of a call of `plain`, `places` are those that are given.
    """

    def __init__(
        self, plain: Function, again: CallAgain, places: Sequence[int], num_inputs: int, count: int
    ) -> None:
        self._plain = plain
        self._again = again
        self._places = places
        self._num_inputs = num_inputs
        self._count = count
        self._given: list[int] = []  # the gradients that there are
        self._num_gradients = 0

    def __call__(self, *values: Any) -> list[torch.Tensor]:
        """Give the gradients."""
        return self._compute(self._plain, values)

    def unchecked(self, *values: Any) -> list[torch.Tensor]:
        """Give the gradients as a call does, where `change_since` has found nothing."""
        has_checks = isinstance(self._plain, PlainCall | PlainGradients)
        return self._compute(self._plain.unchecked if has_checks else self._plain, values)

    def change_since(self, *values: Any) -> str:
        """Say what makes another function of what was recorded; empty if nothing does."""
        if not isinstance(self._plain, PlainCall | PlainGradients):
            return ""
        inputs, _ = self._taken_apart(values)
        with self._again.as_called():
            return self._plain.change_since(*inputs)

    def placed(self, found: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Give all gradients of a call, of those that there are."""
        gradients: list[torch.Tensor | None] = [None] * self._num_gradients
        for i, gradient in zip(self._given, found, strict=True):
            gradients[i] = gradient
        return gradients

    def _compute(self, plain: Function, values: Sequence[Any]) -> list[torch.Tensor]:
        gradients = self._again.gradients(plain, *self._taken_apart(values), True)
        self._num_gradients = len(gradients)
        self._given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return [gradients[i] for i in self._given]

    def _taken_apart(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        flat: list[Any] = [None] * self._count
        for i, value in zip(self._places, values, strict=True):
            flat[i] = value
        return flat[: self._num_inputs], flat[self._num_inputs :]


def _dense(value: Any) -> Any:
    """Give a tensor with its numbers side by side."""
    return value.contiguous() if isinstance(value, torch.Tensor) and not is_dense(value) else value


def _form_of(value: Any) -> Any:
    """Give what is equal for values that the same graph takes."""
    if not isinstance(value, torch.Tensor):
        return value
    is_parameter = isinstance(value, torch.nn.Parameter)
    return (
        value.dtype, value.device, value.shape, value.stride(), value.requires_grad, is_parameter
    )  # fmt: skip
