"""Private names of torch for modules, scripts and functions of operators.

Each has a test in tests/pytorch/test_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_ort.pytorch import patches, private
from torch_ort.pytorch.private import ScriptMethod as ScriptMethod

pytree = private._pytree
OPERATORS = private._VariableFunctions  # as functions of `torch`
pack_padded_sequence = private._pack_padded_sequence
RECURRENT_LAYERS: dict[str, Callable[..., Any]] = {
    "lstm": private.lstm,
    "gru": private.gru,
    "rnn_tanh": private.rnn_tanh,
    "rnn_relu": private.rnn_relu,
}

# The hooks that all modules call.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    private._global_forward_pre_hooks,
    private._global_forward_hooks,
    private._global_backward_pre_hooks,
    private._global_backward_hooks,
)


def script_pointer(module: torch.nn.Module) -> Any:
    """Give what stands behind a scripted or traced module; None for one that is not made yet."""
    return getattr(module, "_c", None)


def script_forward(module: torch.nn.Module) -> ScriptMethod:
    """Give the compiled forward of a scripted module, whatever stands in its place."""
    return script_pointer(module)._get_method("forward")


def calls_replaced(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let `call(theirs, module, ...)` stand for calls of modules in this thread."""
    return patches.MODULE_CALLS.by(call)


def is_norm(module: torch.nn.Module) -> bool:
    """Tell whether a module is a batch norm or an instance norm of PyTorch's."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase)


def is_cache(module: torch.nn.Module, name: str) -> bool:
    """Tell whether an attribute is a list that a module of torch's derives from its parameters."""
    is_recurrent = isinstance(module, torch.nn.RNNBase)
    return is_recurrent and name in ("_flat_weights", "_flat_weight_refs")
