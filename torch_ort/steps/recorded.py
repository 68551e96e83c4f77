"""Runs recorded graphs: training graphs as one autograd node, others as plain calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort.core import autocast
from torch_ort.pytorch.autograd_compat import saved_tensor_hooks_copy
from torch_ort.read.layouts import JointLayout
from torch_ort.record.recorder import Recording
from torch_ort.rules.forms import Spec, dense_order, is_contiguous
from torch_ort.steps.again import CallAgain, Function
from torch_ort.steps.double_backward import DoubleBackward
from torch_ort.steps.first_backward import Kept
from torch_ort.steps.lazy_logits import Recipe
from torch_ort.steps.other_backward import OtherBackward
from torch_ort.steps.runners import ForwardRunner, InferenceRunner
from torch_ort.steps.state import GraphState


class RecordedRun:
    """Runs a recorded graph without gradients."""

    def __init__(self, recording: Recording, runner: InferenceRunner) -> None:
        self.results = recording.results
        self._runner = runner

    def __call__(self, *inputs: Any, given: Sequence[Any] | None = None) -> Sequence[Any]:
        """Run with flat inputs; give the function's results.

        `given` are the caller's own tensors where `inputs` has copies.
        """
        # To enter the context takes as long as a small kernel.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            outputs = self._runner(list(inputs))
        return self.results.of(inputs, outputs, given)


class GraphStep:
    """Runs a training graph: forward now, backward when autograd comes to its node.

    `key` names the recording to what runs its calls again, `states` are those of autocast in which
    the graph's backward is the right one.
    """

    def __init__(
        self, recording: Recording, layout: JointLayout, forward: ForwardRunner, key: int,
        states: Sequence[autocast.State], lazy: Sequence[_C.LazyLogits] = (),
    ) -> None:  # fmt: skip
        self._results = recording.results
        self.forward = forward
        self._outputs = layout.outputs
        self._lazy = [Recipe(each, layout.tensor_inputs) for each in lazy]
        self._step = _C.RecordedStep(
            forward.session,
            layout.tensor_inputs,
            layout.symbol_inputs,
            layout.differentiated,
            [layout.outputs.engine_index(i) for i in recording.tangents],
            sorted(recording.written),
            [_order_of(node.meta["val"].spec) for node in layout.tangents],
            _origins(layout),
            key,
            forward.options.early_gradients,
            [(each.output, each.classes, each.dtypes[-1]) for each in self._lazy],
            states,
        )
        self._is_watched = forward.first_backward is not None
        if self._is_watched:
            self._step.watch_first_backward(forward.first_backward.run_backward)

    def hold_inputs(self) -> None:
        """Hold the inputs of later calls until these end."""
        self._step.hold_inputs()

    def __call__(self, *inputs: Any, given: Sequence[Any] | None = None) -> Sequence[Any]:
        """Run forward with flat inputs; give the function's results. See RecordedRun."""
        kept = self.forward.note_call(inputs)
        if kept is None and self._is_watched:
            self._step.forget_first_backward()
            self._is_watched = False
        packs = saved_tensor_hooks_copy()
        results = self._step(inputs, packs)
        all_rows = [results.pop() for _ in self._lazy]
        if kept is not None and not packs:  # see ForwardRunner
            self.forward.first_backward.after_forward(results[-1], kept)
        for each, rows in zip(self._lazy, reversed(all_rows), strict=True):
            results[each.output] = each.logits(results[each.output], rows, inputs)
        outputs = results if self._outputs.are_tensors else self._outputs.assemble(results)
        return self._results.of(inputs, outputs, given)


class RecordedStep:
    """Runs a recorded training graph as one node of autograd.

    Where backward is another one under the autocast that was around forward, `make_inside` makes
    the step of that: the last backward decides which of both runs.
    """

    def __init__(
        self, recording: Recording, plain: Function, again: CallAgain, twice: DoubleBackward,
        step: GraphStep, make_inside: Callable[[], GraphStep] | None, state: GraphState,
    ) -> None:  # fmt: skip
        self.results = recording.results
        self._step = step
        self._steps = {autocast.OFF: step}
        self._around = recording.around
        self._make_inside = make_inside
        self._holds_inputs = False
        self._lock = threading.Lock()
        self._twice = twice
        self._other = OtherBackward(
            twice.key, plain, again, self._step_for, self._kept_call, state
        )  # fmt: skip

    def __call__(self, *inputs: Any, given: Sequence[Any] | None = None) -> Sequence[Any]:
        """Run forward with flat inputs; give the function's results. See RecordedRun."""
        return self._step(*inputs, given=given)

    def hold_inputs(self) -> None:
        """Hold the inputs of later calls, which can then be run again, until these end."""
        with self._lock:
            self._holds_inputs = True
            for step in self._steps.values():
                step.hold_inputs()

    def _step_for(self, state: autocast.State) -> GraphStep | None:
        """Give the step whose backward is that of a state, and run it from now on; None if none is.

        Raises what compiling it raises.
        """
        with self._lock:
            if state == self._around and self._make_inside is not None:
                self._steps[state] = self._make_inside()
                if self._holds_inputs:
                    self._steps[state].hold_inputs()
                self._make_inside = None
            step = self._steps.get(state)
            if step is not None:
                self._step = step
            return step

    def _kept_call(self, token: torch.Tensor) -> Kept | None:
        guards = [step.forward.first_backward for step in self._steps.values()]
        return next(filter(None, (guard.kept(token) for guard in guards if guard)), None)


def _order_of(spec: Spec) -> list[int]:
    """Give the dims of a gradient by strides, outermost first; none where it is row-major."""
    return [] if is_contiguous(spec) else dense_order(spec)


def _origins(layout: JointLayout) -> list[list[int]]:
    """Give the positions of the outputs that each gradient comes from."""
    reached: dict[fx.Node, set[int]] = {node: {i} for i, node in enumerate(layout.tangents)}
    if len(reached) > 1:
        for node in layout.joint.graph.nodes:
            given = [reached[each] for each in node.all_input_nodes if each in reached]
            if given:
                reached[node] = given[0] if len(given) == 1 else set().union(*given)
    everything = set(range(len(layout.tangents)))
    gradients = [layout.gradients[i] for i in layout.differentiated]
    return [sorted(reached.get(gradient, everything)) for gradient in gradients]
