"""Private names of torch for modules, scripts and functions of operators.

Each has a test in tests/pytorch/test_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree

from torch_ort.pytorch import patches

pytree = _pytree
OPERATORS = torch._C._VariableFunctions  # as functions of `torch`

# The hooks that all modules call.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
)

ScriptMethod = torch._C.ScriptMethod


def script_pointer(module: torch.nn.Module) -> Any:
    """Give what stands behind a scripted or traced module; None for one that is not made yet."""
    return getattr(module, "_c", None)


def script_forward(module: torch.nn.Module) -> ScriptMethod:
    """Give the compiled forward of a scripted module, whatever stands in its place."""
    return script_pointer(module)._get_method("forward")


RECURRENT_LAYERS: dict[str, Callable[..., Any]] = {
    kind: getattr(torch._VF, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
pack_padded_sequence = torch._VF._pack_padded_sequence


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
