"""Recurrent layers in a graph: each call of torch.lstm, gru and rnn is one node, for any length.

PyTorch writes most of them as a chain of operators, one link for each position of the sequence, so
that a graph of theirs would serve one length. Here the layer runs as it does in eager PyTorch, with
an autograd graph of its own, which lives as long as the node's context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_ort._C import Unsupported
from torch_ort.functions.call import Calls
from torch_ort.functions.own_graph import gradients_through
from torch_ort.pytorch.module_compat import RECURRENT_LAYERS, pack_padded_sequence
from torch_ort.pytorch.trace_compat import is_traced


class RecurrentLayer(torch.autograd.Function):
    """A call of torch.lstm, gru, rnn_tanh or rnn_relu, time first."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, num_states: int, has_biases: bool, num_layers: int, dropout: float,
        is_training: bool, is_bidirectional: bool, *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Run the layer on the sequence, the states and the weights in `tensors`."""
        # Without data the form of the results would be learnt from real tensors.
        if not all(map(_has_numbers, tensors)):
            raise Unsupported(f"{kind}: its graph would be made for the length of the trace alone")
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            sequence, *states = given[: 1 + num_states]
            results = RECURRENT_LAYERS[kind](
                sequence, states if kind == "lstm" else states[0], given[1 + num_states :],
                has_biases, num_layers, dropout, is_training, is_bidirectional, False,
            )  # fmt: skip
        ctx.given, ctx.results = given, results
        return tuple(result.detach().contiguous() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run backward through the layer's own graph, which goes with the context."""
        own = gradients_through(ctx.results, gradients, ctx.given)
        return (*[None] * (len(ctx.needs_input_grad) - len(own)), *own)


def _has_numbers(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not is_traced(tensor)


class _Whole(TorchFunctionMode):
    """Puts calls of recurrent layers into the trace as nodes."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Call a function of torch's."""
        kind = _KINDS.get(func)
        if kind is None or kwargs or not is_traced(args[0]):  # torch.nn passes no keyword arguments
            return func(*args, **(kwargs or {}))
        return self._put(kind, *args)

    def _put(self, kind: str, sequence: torch.Tensor, *args: Any) -> Any:
        if kind == _PACKING or isinstance(args[2], list | tuple):
            raise Unsupported(
                f"{kind}: the sizes of a packed sequence are numbers in a tensor, which a captured "
                "graph cannot follow; give padded sequences, or pack and run the layer outside of "
                "the wrapped module"
            )
        states, weights, *settings, batch_first = args
        states = list(states) if kind == "lstm" else [states]
        if batch_first:
            sequence = sequence.transpose(0, 1)
        arguments = (kind, len(states), *settings, sequence, *states, *weights)
        output, *states = self._calls.put(RecurrentLayer, arguments)
        return (output.transpose(0, 1) if batch_first else output, *states)


_PACKING = "pack_padded_sequence"
_KINDS: dict[Callable[..., Any], str] = {
    pack_padded_sequence: _PACKING,
    **{layer: kind for kind, layer in RECURRENT_LAYERS.items()},
    # The functions as scripts call them.
    **{getattr(torch.ops.aten, kind).input: kind for kind in RECURRENT_LAYERS},
}


@contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Keep recurrent layers whole in traces made in the block."""
    calls = Calls()
    try:
        with _Whole(calls):
            yield
    finally:
        calls.forget()
