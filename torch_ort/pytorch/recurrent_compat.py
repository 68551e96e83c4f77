"""Private names of torch for recurrent layers in functions that Dynamo captures.

Dynamo refuses functions that call torch.nn.LSTM, GRU or RNN, or, if `allow_rnn` says so, writes a
graph for each length of their sequences. For our backends it captures such a layer as the engine
computes it, for any length, where there are kernels; the setting stays as the user has it, for
others.

tests/torch_ort/test_recurrent.py fails when torch changes one of the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torch_ort.pytorch import patches
from torch_ort.pytorch.module_compat import RECURRENT_LAYERS
from torch_ort.pytorch.private import ConstantVariable, UserFunctionVariable, exc
from torch_ort.pytorch.private import config as dynamo_config

_KINDS = {function: kind for kind, function in RECURRENT_LAYERS.items()}


@contextmanager
def recurrent_layers_captured(
    layers: Callable[..., Any], have_kernels: Callable[[Sequence[torch.Tensor]], bool],
    autocast_to: Callable[[], str],
) -> Iterator[None]:  # fmt: skip
    """Let Dynamo capture recurrent layers in the block as calls of `layers(kind, autocast, ...)`.

    It is called with the arguments of torch.lstm, gru, rnn_tanh or rnn_relu, and traced; before
    them stand the kind and what `autocast_to` says where the layer is called. Layers with
    projections, those of which `have_kernels` is not true of sequence, states and weights, and
    packed sequences, are met as Dynamo meets them.
    """

    def wrap(theirs: Callable, builder: Any, module: torch.nn.Module) -> Any:
        with _allowed(module, have_kernels):
            return theirs(builder, module)

    def call(theirs: Callable, self: Any, tx: Any, args: Sequence[Any], kwargs: dict) -> Any:
        kind = _KINDS.get(self.value)
        if kind is None:
            return theirs(self, tx, args, kwargs)
        if not _is_packed(args) and have_kernels(_examples(args[:3])):
            given = [*map(ConstantVariable.create, (kind, autocast_to())), *args]
            return UserFunctionVariable(layers).call_function(tx, given, kwargs)
        if dynamo_config.allow_rnn:
            return theirs(self, tx, args, kwargs)
        exc.unimplemented(
            gb_type="Attempted to wrap RNN, GRU, or LSTM", context=kind, hints=[],
            explanation="The sequence is packed, or of a dtype or device without kernels.",
        )  # fmt: skip
        return None

    with patches.WRAPPED_MODULES.by(wrap), patches.FUNCTIONS_IN_GRAPHS.by(call):
        yield


def _allowed(
    module: torch.nn.Module, have_kernels: Callable[[Sequence[torch.Tensor]], bool]
) -> AbstractContextManager[None]:
    is_recurrent = isinstance(module, torch.nn.RNNBase) and not module.proj_size
    if is_recurrent and have_kernels(list(module.parameters())):
        return patches.RECURRENT_MODULES.by(True)
    return nullcontext()


def _is_packed(args: Sequence[Any]) -> bool:
    """Tell which of two forms a call has: where the others have a number, this one has weights."""
    return not args[3].is_python_constant()


def _examples(variables: Sequence[Any]) -> list[torch.Tensor]:
    """Give examples of tensors, and of those in lists."""
    examples = []
    for each in variables:
        items = getattr(each, "items", None)
        if isinstance(items, list | tuple):
            examples += _examples(items)
        else:
            examples.append(each.as_proxy().node.meta["example_value"])
    return examples
