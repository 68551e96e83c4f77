"""Runs recorded graphs: training graphs as one autograd node, others as plain calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort.pytorch.autograd_compat import saved_tensor_hooks_copy
from torch_ort.read.layouts import JointLayout
from torch_ort.record.recorder import Recording
from torch_ort.rules.forms import Spec, dense_order, is_contiguous
from torch_ort.steps.double_backward import DoubleBackward
from torch_ort.steps.lazy_logits import Recipe
from torch_ort.steps.runners import ForwardRunner, InferenceRunner


class RecordedRun:
    """Runs a recorded graph without gradients."""

    def __init__(self, recording: Recording, runner: InferenceRunner) -> None:
        self.results = recording.results
        self._runner = runner

    def __call__(self, *inputs: Any, given: Sequence[Any] | None = None) -> Sequence[Any]:
        """Run with flat inputs; give the function's results.

        `given` are the caller's own tensors where `inputs` has copies.
        """
        with torch.no_grad():
            outputs = self._runner(list(inputs))
        return self.results.of(inputs, outputs, given)


class RecordedStep:
    """Runs a recorded training graph: forward now, backward when autograd comes to its node."""

    def __init__(
        self, recording: Recording, layout: JointLayout, forward: ForwardRunner,
        double_backward: DoubleBackward, lazy: Sequence[_C.LazyLogits] = (),
    ) -> None:  # fmt: skip
        self.results = recording.results
        self._double_backward = double_backward
        self._forward = forward
        self._outputs = layout.outputs
        self._lazy = [Recipe(each, layout.tensor_inputs) for each in lazy]
        self._step = _C.RecordedStep(
            forward.session,
            layout.tensor_inputs,
            layout.symbol_inputs,
            layout.differentiated,
            [layout.outputs.engine_index(i) for i in recording.tangents],
            [_order_of(node.meta["val"].spec) for node in layout.tangents],
            _origins(layout),
            double_backward.key,
            forward.options.early_gradients,
            [(each.output, each.classes, each.dtypes[-1]) for each in self._lazy],
        )
        self._is_watched = forward.first_backward is not None
        if self._is_watched:
            self._step.watch_first_backward(forward.first_backward.run_backward)

    def __call__(self, *inputs: Any, given: Sequence[Any] | None = None) -> Sequence[Any]:
        """Run forward with flat inputs; give the function's results. See RecordedRun."""
        kept = self._forward.note_call(inputs)
        if kept is None and self._is_watched:
            self._step.forget_first_backward()
            self._is_watched = False
        results = self._step(inputs, saved_tensor_hooks_copy())
        all_rows = [results.pop() for _ in self._lazy]
        if kept is not None:
            self._forward.first_backward.after_forward(results[-1], kept)
        for each, rows in zip(self._lazy, reversed(all_rows), strict=True):
            results[each.output] = each.leave(results[each.output], rows, inputs)
        outputs = results if self._outputs.are_tensors else self._outputs.assemble(results)
        return self.results.of(inputs, outputs, given)


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
