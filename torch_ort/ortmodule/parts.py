"""Parts of a module that run in the engine by themselves, where the whole cannot be captured."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from torch_ort.guards.scripts import is_script
from torch_ort.ortmodule.calls import Calls, is_traced, make_calls
from torch_ort.ortmodule.debug_options import DebugOptions


def take_apart(
    module: torch.nn.Module, debug: DebugOptions, wrapper: type, *, only_composed: bool = False
) -> bool:
    """Let each sub-module try the engine when it is called; gives whether there are any.

    Of those that lie in one another the outermost that can be captured runs in the engine; what is
    a `wrapper` does so by itself. `only_composed`: sub-modules without parts of their own, of which
    a graph has little to gain, stay out.
    """
    in_scripts = {
        inner
        for script in module.modules()
        if is_script(script)
        for inner in script.modules()
        if inner is not script
    }  # their calls are compiled into the script
    found = False
    for part in module.modules():
        static = inspect.getattr_static(type(part), "forward")
        has_forward = static is not torch.nn.Module.forward and part not in in_scripts
        is_small = only_composed and next(part.children(), None) is None
        if part is module or isinstance(part, wrapper) or not has_forward or is_small:
            continue
        found = True
        if not isinstance(part.forward, _PartForward):
            part.forward = _PartForward(part, debug)
    return found


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

    def __reduce__(self) -> tuple:
        # Copies and files hold what stood here before, and need no torch_ort to be read.
        return functools.partial, (type(self._module).forward, self._module)
