"""`torch_ort.compile`: torch.compile for TorchScript too, which torch.compile refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_ort import options as tables
from torch_ort._C import UserError
from torch_ort.guards.scripts import is_script
from torch_ort.ortmodule import DebugOptions, ORTModule


def compile(  # named as torch.compile is
    model: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
) -> Any:
    """Compile a module or function for the engine, a scripted or traced one too.

    What has no scripted part goes to `torch.compile(model, backend="ort", ...)`. TorchScript, and
    modules with scripts inside, become an ORTModule, whose names of parameters are those of the
    module: one graph for all sizes, whatever `dynamic` says. `fullgraph` raises where the module
    cannot be captured, instead of running it in PyTorch. Without `model` this is a decorator.
    Raises UserError on an unknown option or mode, or if both are given.
    """
    settings = {"fullgraph": fullgraph, "dynamic": dynamic, "mode": mode, "options": options}
    if model is None:
        return functools.partial(compile, disable=disable, **settings)
    if isinstance(model, torch.jit.ScriptFunction):
        target: torch.nn.Module = _FunctionModule(model)
    elif isinstance(model, torch.nn.Module) and any(map(is_script, model.modules())):
        target = model
    else:
        return torch.compile(model, backend="ort", disable=disable, **settings)
    if disable:
        return model
    if mode is not None and options is not None:
        raise UserError("torch_ort.compile: got both mode and options, want one of them")
    tables.resolve(options, mode)
    config = dict(options or {})
    if fullgraph:
        config["fallback_policy"] = "FALLBACK_DISABLE"
    return ORTModule(target, DebugOptions(config=config))


class _FunctionModule(torch.nn.Module):
    """A scripted function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
