"""`torch_ort.compile`: like torch.compile, but for TorchScript too, which torch.compile refuses."""

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
    """Compile a module or function for the engine; it may be a scripted or traced one.

    A model without TorchScript goes to `torch.compile(model, backend="ort", ...)`, with all
    arguments. A scripted or traced function, a ScriptModule, or a module with one inside becomes an
    ORTModule, with the same names of parameters: one graph serves all sizes, whatever `dynamic` is.

        compiled = torch_ort.compile(torch.jit.script(model))

    Args:
        model: A module, a function or TorchScript; if None, this is a decorator.
        fullgraph: Raise an error if the model cannot be captured as one graph.
        dynamic: As for torch.compile; of no effect on TorchScript.
        mode: As for torch.compile; not together with `options`.
        options: Options of docs/options.md by name.
        disable: Do not compile; calls run the model as it is.

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
