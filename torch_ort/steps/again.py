"""Runs a call of a recorded graph again, so that autograd sees what the graph hides from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from torch_ort.core import autocast
from torch_ort.pytorch.graph_compat import draws, schema, written_placeholders
from torch_ort.record.recorder import Recording

Tensors = Sequence[torch.Tensor | None]
Function = Callable[..., Sequence[Any]]  # of a call's flat inputs

GONE = "its inputs were freed, or were written into after the call"

BATCHED = (
    "backward() is called with a batch of gradients (is_grads_batched=True, torch.vmap), which a "
    "captured graph does not take"
)


def other_state(now: autocast.State) -> str:
    """Say that backward() was called in another state of autocast than expected."""
    words = " and ".join(f"{dtype} on {device}" for device, dtype in now) or "no autocast"
    return f"backward() is called under {words}, for which its graph was not captured"


class CallAgain:
    """Calls of one recorded graph; `differentiated` are the inputs of which it gives gradients."""

    def __init__(self, recording: Recording, differentiated: Sequence[int]) -> None:
        self._results = recording.results
        self._tangents = recording.tangents
        self._written = recording.written
        self._differentiated = differentiated
        self._around = recording.around
        self._caches = torch.is_autocast_cache_enabled()
        self._defaults = autocast.dtypes_now()
        graph = recording.module.graph
        inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        self._asking = [getattr(value, "wants_gradient", False) for value in inputs]
        self._parameters = [getattr(value, "is_parameter", False) for value in inputs]
        # Why a call cannot be run again without what a first run keeps; empty if it can.
        self.obstacle = _obstacle(graph)

    @property
    def is_without_autocast(self) -> bool:
        """Tell whether the calls are under no autocast."""
        return not self._around

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Compute in the block as the calls did."""
        with torch.enable_grad(), autocast.in_state(self._around, self._caches, self._defaults):
            yield

    def new_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Give other objects for a call's inputs: the history of these is outside of the graph."""
        with torch.enable_grad():
            return [self._new_input(i, value) for i, value in enumerate(inputs)]

    def gradients(
        self, function: Function, inputs: Sequence[Any], tangents: Tensors, keeps_history: bool
    ) -> list[torch.Tensor | None]:
        """Run forward as it was called, and backward in the state of autocast that is active.

        Give what the graph gives: the gradients of the inputs that are differentiated.
        """
        with self.as_called():
            results = function(*inputs)
        outputs = self._results.outputs_in(results, self._tangents)
        wanted = [inputs[i] for i in self._differentiated]
        return gradients_of(outputs, wanted, tangents, keeps_history)

    def _new_input(self, position: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if position in self._written:
            return value.detach().clone()
        if not self._asking[position]:  # it may ask since then
            return value.detach() if value.requires_grad else value
        new = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
        if self._parameters[position]:
            new._is_param = True  # isinstance() uses this
        return new


def gradients_of(
    outputs: Tensors, inputs: Sequence[Any], tangents: Tensors, keeps_history: bool
) -> list[torch.Tensor | None]:
    """Give gradients as autograd does; None for inputs that are not tensors or have none."""
    pairs = [
        (output, tangent)
        for output, tangent in zip(outputs, tangents, strict=True)
        if output is not None and output.requires_grad and tangent is not None
    ]
    wanted = [
        i for i, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]  # fmt: skip
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    if pairs and wanted:
        found = torch.autograd.grad(
            [output for output, _ in pairs], [inputs[i] for i in wanted],
            [tangent for _, tangent in pairs], create_graph=keeps_history, allow_unused=True,
        )  # fmt: skip
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
    return gradients


def _obstacle(graph: fx.Graph) -> str:
    """Say why a call of a graph cannot be run again; empty if it can."""
    if any(map(draws, graph.nodes)):
        return "it draws random numbers, which would be others"
    if _reads_what_it_writes(graph):
        return "it reads what it writes into"
    return ""


def _reads_what_it_writes(graph: fx.Graph) -> bool:
    """Tell whether results or gradients depend on what inputs held before they were written into.

    What is written may, as running statistics do.
    """
    touched = set(written_placeholders(graph))
    for node in graph.nodes:
        reads = [each for each in node.all_input_nodes if each in touched]
        if not reads or node.target is torch.ops.aten.copy_.default:
            continue
        if node.op == "output":
            return True
        is_item = node.target is operator.getitem
        if is_item and _is_training_norm(reads[0]) and node.args[1] not in _NEW_STATISTICS:
            continue
        if node.target is _NORM_BACKWARD and _is_training_norm(node):
            reads = [each for each in reads if each not in node.args[3:5]]
        if reads:
            touched.add(node)
    return False


_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_NEW_STATISTICS = (3, 4)  # the results that alone depend on the old statistics, in training


def _is_training_norm(node: fx.Node) -> bool:
    if node.target not in (_NORM, _NORM_BACKWARD):
        return False
    names = [argument.name for argument in schema(node.target).arguments]
    return bool(node.args[names.index("training" if node.target is _NORM else "train")])
