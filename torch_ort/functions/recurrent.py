"""Recurrent layers in a graph: a call of torch.lstm, gru or rnn is a few nodes, for any length.

PyTorch writes most of them as a chain of operators, one link for each position of the sequence, so
that a graph of theirs would serve one length. On the CPU a layer is written as products over all
positions and the operator `torch_ort::recurrent` (csrc/cpu/recurrent.h) for what each position
needs of the one before. Elsewhere a call is one node, which runs as in eager PyTorch, with an
autograd graph of its own that lives as long as the node's context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from torch_ort._C import Unsupported
from torch_ort.functions.call import Calls
from torch_ort.functions.own_graph import gradients_through
from torch_ort.pytorch.module_compat import RECURRENT_LAYERS, pack_padded_sequence
from torch_ort.pytorch.recurrent_compat import recurrent_layers_captured
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


SHORT_FLOATS = (torch.bfloat16, torch.float16)


def have_kernels(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether the engine computes recurrent layers of such tensors.

    They are on the CPU and of one floating dtype; under autocast they are of float32 or of its
    dtype. Products of short floats are of that dtype; from one position to the next all is float32.
    """
    dtypes = {each.dtype for each in tensors}
    if not all(each.device.type == "cpu" for each in tensors):
        return False
    if torch.is_autocast_enabled("cpu"):
        return dtypes <= {torch.float32, torch.get_autocast_dtype("cpu")}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64, *SHORT_FLOATS}


def autocast_to() -> str:
    """Name the dtype of products under autocast on the CPU; empty where it is off."""
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")


class Layers(NamedTuple):
    """The layers of one call, as the functions of torch name what describes them."""

    kind: str  # lstm, gru, rnn_tanh or rnn_relu
    autocast: str  # as autocast_to() says
    has_biases: bool
    num_layers: int
    dropout: float  # between layers, in training
    is_training: bool
    is_bidirectional: bool

    def __call__(
        self, sequence: torch.Tensor, states: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Give the output and the last states.

        `sequence` is [positions, batch, features], and each of the states is
        [layers * directions, batch, width], as the states that are given back.
        """
        ends: list[Sequence[torch.Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self._num_directions):
                i = layer * self._num_directions + direction
                own = weights[i * self._weights_each : (i + 1) * self._weights_each]
                output, *end = self._run(
                    sequence, [state[i] for state in states], own, direction == 1
                )
                outputs.append(output)
                ends.append(end)
            sequence = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout and layer < self.num_layers - 1:
                sequence = torch.dropout(sequence, self.dropout, self.is_training)
        return [sequence, *(torch.stack(each) for each in zip(*ends, strict=True))]

    @property
    def num_weights(self) -> int:
        """The number of weights. Layers with projections have more."""
        return self.num_layers * self._num_directions * self._weights_each

    @property
    def _num_directions(self) -> int:
        return 2 if self.is_bidirectional else 1

    @property
    def _num_states(self) -> int:
        return 2 if self.kind == "lstm" else 1

    @property
    def _weights_each(self) -> int:
        return 4 if self.has_biases else 2

    def _run(
        self, sequence: torch.Tensor, states: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor], reverse: bool,
    ) -> Sequence[torch.Tensor]:  # fmt: skip
        """Run one layer in one direction; give its output and its last states."""
        of_input, of_state, *biases = weights
        bias, hidden_bias = self._biases(biases)
        state, memory = states if self.kind == "lstm" else (states[0], None)
        gates = torch.nn.functional.linear(sequence, of_input, bias)
        results = torch.ops.torch_ort.recurrent(
            *map(_wide, (gates, of_state, hidden_bias, state, memory)), self.kind, reverse, False
        )
        dtype = self._result_dtype(sequence, state)
        return [result.to(dtype) for result in results[: 1 + self._num_states]]

    def _result_dtype(self, sequence: torch.Tensor, state: torch.Tensor) -> torch.dtype:
        """Give the dtype of PyTorch's results, which follow the state where it is not cast.

        A GRU, and an LSTM without kernels of oneDNN's, add to the state that they are given.
        """
        if not self.autocast:
            return sequence.dtype
        follows_state = self.kind == "gru" or (self.kind == "lstm" and self.autocast == "float16")
        return state.dtype if follows_state else getattr(torch, self.autocast)

    def _biases(
        self, biases: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Give what is added to the gates, and what a GRU adds inside of its reset gate."""
        if not biases:
            return None, None
        of_input, of_state = biases
        if self.kind != "gru":
            return of_input + of_state, None
        width = of_state.shape[0] // 3
        gates, inside = of_state.split([2 * width, width])
        return of_input + torch.nn.functional.pad(gates, (0, width)), inside


def _wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Give short floats as float32."""
    return tensor.float() if tensor is not None and tensor.dtype in SHORT_FLOATS else tensor


def layers_by_kernels(
    kind: str, autocast: str, sequence: torch.Tensor, states: Any,
    weights: Sequence[torch.Tensor], *settings: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Give what torch.lstm, gru, rnn_tanh or rnn_relu give, for tensors that have kernels here.

    The other arguments are those of these functions; `autocast` is what autocast_to() says.
    """
    *described, batch_first = settings
    layers = Layers(kind, autocast, *described)
    given = states if kind == "lstm" else [states]
    return _positions_first(
        lambda sequence: layers(sequence, given, weights), sequence, batch_first
    )


def _positions_first(
    run: Callable[[torch.Tensor], Sequence[torch.Tensor]], sequence: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, ...]:
    """Give what `run` gives for a sequence; it takes and gives those with positions first."""
    if not batch_first:
        return tuple(run(sequence))
    output, *ends = run(sequence.transpose(0, 1))
    return (output.transpose(0, 1), *ends)


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
        given = list(states) if kind == "lstm" else [states]
        has_kernels = have_kernels([sequence, *given, *weights])
        autocast = autocast_to()
        if has_kernels and Layers(kind, autocast, *settings).num_weights == len(weights):
            return layers_by_kernels(kind, autocast, sequence, *args)

        def put(sequence: torch.Tensor) -> Sequence[torch.Tensor]:
            arguments = (kind, len(given), *settings, sequence, *given, *weights)
            return self._calls.put(RecurrentLayer, arguments)

        return _positions_first(put, sequence, batch_first)


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


def recurrent_layers_in_graphs() -> AbstractContextManager[None]:
    """Let Dynamo capture recurrent layers in the block, where there are kernels for them."""
    return recurrent_layers_captured(layers_by_kernels, have_kernels, autocast_to)
