"""Gradients of recorded graphs that can be differentiated again: create_graph=True.

The engine computes the gradients. If the program differentiates these, eager PyTorch runs the call
again with the same inputs, and runs all later calls of the graph.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.fallback import Failure, warn
from torch_ort.functions.call import AUTOCAST_DEVICES, autocast_now
from torch_ort.pytorch.autograd_compat import node_of_graph
from torch_ort.pytorch.graph_compat import draws, schema, written_placeholders
from torch_ort.record.recorder import Recording
from torch_ort.steps.runners import ForwardRunner
from torch_ort.steps.state import GraphState

_REASON = "gradients are differentiated again, which a captured graph cannot do (create_graph=True)"
_REFUSED = "torch_ort does not currently support double backward"
_FROM_NOW_ON = (
    "later calls of this graph run in eager PyTorch, which supports it: run the step again"
)
_GONE = "its inputs were freed, or were written into after the call"

_Tensors = Sequence[torch.Tensor | None]

_keys = itertools.count(1)
_graphs: weakref.WeakValueDictionary[int, DoubleBackward] = weakref.WeakValueDictionary()


class DoubleBackward:
    """Differentiates the gradients of one recorded graph, for as long as this lives.

    `function` is what was recorded, as eager PyTorch runs it. It takes the flat inputs of a call,
    and raises Unsupported where it is another function by now.
    """

    def __init__(
        self, function: Callable[..., Sequence[Any]], recording: Recording,
        differentiated: Sequence[int], state: GraphState,
    ) -> None:  # fmt: skip
        self.key = next(_keys)
        self._function = function
        self._results = recording.results
        self._tangents = recording.tangents
        self._written = recording.written
        self._differentiated = differentiated
        self._autocast = autocast_now()
        self._state = state
        self._obstacle = _obstacle(recording.module.graph)
        _graphs[self.key] = self

    def differentiate(
        self, inputs: Sequence[Any] | None, tangents: _Tensors, given: _Tensors
    ) -> list[torch.Tensor | None]:
        """Give the gradients of a call's flat inputs, then those of its tangents.

        `given` are those of the gradients that it gave. Raises Unsupported where the call cannot be
        run again.
        """
        if self._state.options.strict:
            raise Unsupported(f"{_REFUSED}: {_REASON}")
        is_first = not self._state.is_differentiated_twice
        self._state.failed = self._state.is_differentiated_twice = True
        why = _GONE if inputs is None else self._obstacle
        if why:
            raise Unsupported(f"{_REFUSED} of this call: {why}; {_FROM_NOW_ON}")
        gradients = self._run_again(inputs, tangents, given)
        if is_first:
            warn(Failure(Unsupported(_REASON), "backward"))
        return gradients

    def _run_again(
        self, inputs: Sequence[Any], tangents: _Tensors, given: _Tensors
    ) -> list[torch.Tensor | None]:
        keeps_history = torch.is_grad_enabled()
        with torch.enable_grad():
            # Other tensor objects, because the history of the given ones is outside of the graph.
            inputs = [self._stand_in(i, value) for i, value in enumerate(inputs)]
            tangents = [None if each is None else each.view_as(each) for each in tangents]
            with _autocast(self._autocast):
                results = self._function(*inputs)
            outputs = self._results.outputs_in(results, self._tangents)
            gradients = _gradients(
                outputs, [inputs[i] for i in self._differentiated], tangents, keeps_history=True
            )
        return _gradients(gradients, [*inputs, *tangents], given, keeps_history)

    def _stand_in(self, position: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if position in self._written:
            return value.detach().clone()
        if not value.requires_grad:
            return value
        new = value.view_as(value)
        if isinstance(value, torch.nn.Parameter):
            new._is_param = True  # isinstance() uses this
        return new


def _gradients(
    outputs: _Tensors, inputs: Sequence[Any], tangents: _Tensors, keeps_history: bool
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


@contextmanager
def _autocast(kinds: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Run under autocast of these kinds of devices, and no others."""
    dtypes = dict(kinds)
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            is_on = device in dtypes
            if is_on or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtypes.get(device), enabled=is_on))
        yield


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


class RefusingStep:
    """Runs a training graph that AOTAutograd has captured, whose node knows no inputs of the call.

    Where its gradients are differentiated this raises, and it runs in eager PyTorch from then on.
    """

    def __init__(
        self, compiled: Callable[..., Any], state: GraphState, forward: ForwardRunner
    ) -> None:
        self._compiled = compiled
        self._state = state
        self._forward = forward

    def __call__(self, *inputs: Any) -> Any:
        """Run forward."""
        results = self._compiled(*inputs)
        node = node_of_graph(results)
        if node is not None:
            node.register_hook(self._watch)
            self._forward.let_leave_early(results)
        return results

    def _watch(self, gradients: _Tensors, tangents: _Tensors) -> None:
        if not torch.is_grad_enabled():
            return
        nodes = {each.grad_fn for each in gradients if each is not None and each.grad_fn}
        for node in nodes:
            node.register_prehook(self._refuse)

    def _refuse(self, given: _Tensors) -> None:
        if self._state.options.strict:
            raise Unsupported(f"{_REFUSED}: {_REASON}")
        self._state.failed = self._state.is_differentiated_twice = True
        raise Unsupported(f"{_REFUSED} of this call: AOTAutograd has captured it; {_FROM_NOW_ON}")


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

    def differentiate(
        self, tensors: Sequence[torch.Tensor], given: _Tensors
    ) -> list[torch.Tensor | None]:
        """Give the gradients of the tensors."""
        graph = _graphs.get(self.key)
        if graph is None:
            raise Unsupported(f"{_REFUSED} of this call: its compiled code was reset")
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        inputs = leaves[: self.num_inputs] if self.has_inputs else None
        found = graph.differentiate(inputs, leaves[self.num_inputs :], given)
        return [found[place] for place in self.places]


def _with_history(
    key: int, inputs: Sequence[Any] | None, tangents: _Tensors,
    compute: Callable[[], list[torch.Tensor | None]],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Give what `compute` gives, so that it can be differentiated; called from autograd's node."""
    has_inputs = inputs is not None
    if not has_inputs:
        inputs = [torch.empty(0, requires_grad=True)]  # so that the gradients have a history
    leaves = [*inputs, *tangents]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None
    call = _Call(key, has_inputs, len(inputs), leaves, places)
    return _Gradients.apply(call, compute, *tensors)


_C.set_differentiable_gradients(_with_history)
