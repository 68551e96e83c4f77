"""HierarchicalORTModule: where the whole module cannot be captured, its largest parts that can."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from torch_ort.guards.scripts import is_script
from torch_ort.ortmodule.calls import Calls, is_traced
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.module import ORTModule, make_calls


class HierarchicalORTModule(ORTModule):
    """An ORTModule whose sub-modules run in the engine, where the whole cannot be captured.

    The first call that cannot be captured runs in plain PyTorch; from the next one on each
    sub-module runs in the engine by itself, or its own sub-modules do in their turn. What has no
    parts and cannot be captured stays in PyTorch. The tree of modules stays what it is.
    """

    def _make_calls(self, *arguments: Any) -> Calls:
        calls = super()._make_calls(*arguments)
        calls.instead_of_pytorch = self._take_apart
        return calls

    def _take_apart(self) -> None:
        in_scripts = {
            inner
            for script in self._original.modules()
            if is_script(script)
            for inner in script.modules()
            if inner is not script
        }  # their calls are compiled into the script
        for part in self._original.modules():
            static = inspect.getattr_static(type(part), "forward")
            has_forward = static is not torch.nn.Module.forward and part not in in_scripts
            if part is self._original or isinstance(part, ORTModule) or not has_forward:
                continue
            if not isinstance(part.forward, _PartForward):
                part.forward = _PartForward(part, self._debug_options)


class _PartForward:
    """The forward of a sub-module: in the engine where it can be captured, else its own."""

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions) -> None:
        self._module = module
        self._debug_options = debug_options
        self._instance_forward: Callable | None = (
            module.forward if is_script(module) else vars(module).get("forward")
        )
        self._calls: Calls | None = None

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Run what the module's forward would be without this."""
        forward = self._instance_forward
        if forward is None:
            forward = types.MethodType(type(self._module).forward, self._module)
        return forward(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():  # part of a larger graph
            return self.own(*args, **kwargs)
        if self._calls is None:
            self._calls = make_calls(self._module, self._debug_options, run=self.own)
            self._calls.instead_of_pytorch = lambda: None
        return self._calls(args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_calls": None}
