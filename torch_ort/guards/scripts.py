"""Scripted modules: their attributes, their signature, and guards of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.pytorch.module_compat import script_forward, script_pointer

_REQUIRED = inspect.Parameter.empty


def is_script(module: torch.nn.Module) -> bool:
    """Tell whether a module is scripted or traced, so that its attributes live in C++."""
    return isinstance(module, torch.jit.ScriptModule) and script_pointer(module) is not None


def script_object(module: torch.nn.Module) -> _C.ScriptObject:
    """Give the attributes of a scripted module."""
    return _C.ScriptObject(script_pointer(module))


def signature_of(module: torch.nn.Module) -> inspect.Signature:
    """Give the signature of a module's forward, a traced one's too."""
    if not is_script(module):
        return inspect.signature(module.forward)
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else _REQUIRED,
        )
        for argument in script_forward(module).schema.arguments[1:]
    ]
    return inspect.Signature(parameters)


def guard_row(owner: _C.ScriptObject, name: str, words: str) -> tuple[Any, Any, str, Any, str]:
    """Give what `_C.CallGuard` compares of an attribute that is no tensor.

    Tensors in a list are inputs of the graph. Raises Unsupported for those in other containers.
    """
    value = owner[name]
    if isinstance(value, list) and holds_tensor(value):
        return (owner, name, "size", len(value), f"the number of parts of {words}")
    if holds_tensor(value):
        raise Unsupported(
            f"TorchScript: {words} holds tensors in a {type(value).__name__}, which a captured "
            "graph cannot follow"
        )
    return (owner, name, "equals", value, words)


def holds_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor, or a container with one."""
    if isinstance(value, dict):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_tensor, value))
    return isinstance(value, torch.Tensor)
