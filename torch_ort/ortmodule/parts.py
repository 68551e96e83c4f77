"""Sub-modules that run in the engine by themselves where the whole module cannot be captured."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_ort.guards.scripts import is_script, signature_of
from torch_ort.guards.structure import Structure
from torch_ort.ortmodule.calls import Calls, is_traced, make_calls
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.pytorch.autograd_compat import after_backward, saved_tensor_hooks_active

_OF_METHODS = ("__func__", "__self__", "__name__", "__qualname__", "__code__")


class Parts:
    """The sub-modules of a module, each of which tries the engine when it is called.

    Of nested sub-modules the outermost that can be captured runs in the engine. Sub-modules of the
    class `wrapper` are left alone, since they run in the engine by themselves.

    `takes_whole`: the module is one of its own parts, of what calls it.

    Calls that record gradients stay out while a backward of a call that has run in PyTorch is to
    come: there, batch norms save the running statistics that the engine would write.

    `is_cautious`: sub-modules without parts of their own, of which a graph has little to gain, stay
    out. So do calls that record gradients until there was a backward without `create_graph=True`,
    as not all that eager PyTorch differentiates twice could be differentiated twice in the engine;
    and those in a checkpoint, which has to save the same when it runs again.
    """

    def __init__(
        self, module: torch.nn.Module, wrapper: type, *, is_cautious: bool = False,
        takes_whole: bool = False,
    ) -> None:  # fmt: skip
        self._module = module
        self._wrapper = wrapper
        self._is_cautious = is_cautious
        self._takes_whole = takes_whole
        self._may_train: bool | None = None if is_cautious else True  # None: not known yet
        self._may_have_run = False
        self._plain_calls: weakref.WeakSet[_PlainCall] = weakref.WeakSet()

    def may_run(self) -> bool:
        """Tell whether a part may serve the call at hand."""
        if not torch.is_grad_enabled():
            return True
        return self._is_open() and not (self._is_cautious and saved_tensor_hooks_active())

    def _is_open(self) -> bool:
        return bool(self._may_train) and not self._plain_calls

    def take(self, debug: DebugOptions) -> Callable[[Any], None] | None:
        """Let each part try the engine from now on; gives `watch` if there are any."""
        found = False
        whole = [("model", self._module)] if self._takes_whole else []
        for name, part in (*whole, *_inside(self._module, self._wrapper)):
            static = inspect.getattr_static(type(part), "forward")
            is_small = self._is_cautious and next(part.children(), None) is None
            if static is torch.nn.Module.forward or is_small:
                continue
            found = True
            if not isinstance(part.forward, _PartForward):
                part.forward = _PartForward(part, self, _for_part(debug, name))
        return self.watch if found else None

    def stay_out(self) -> bool:
        """Tell whether all parts that have tried the engine run in PyTorch from now on.

        False before one has tried, unless there are none.
        """
        forwards = [vars(part).get("forward") for _, part in _inside(self._module, self._wrapper)]
        parts = [each for each in forwards if isinstance(each, _PartForward)]
        tried = [each for each in parts if each.has_tried]
        return all(each.stays_out for each in tried) and (bool(tried) or not parts)

    def watch(self, result: Any) -> None:
        """Wait for the backward of a call that has run in PyTorch."""
        may_have_run, self._may_have_run = self._may_have_run, True  # not in the first call
        if not torch.is_grad_enabled() or (may_have_run and self._is_open()):
            return
        call = _PlainCall(self)
        for leaf in Structure(result, "output", keeps_others=True).leaves:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(call.before_backward)
                self._plain_calls.add(call)

    def note_backward(self, call: _PlainCall) -> None:
        """Note the backward of a call, which runs now."""
        if self._may_train is None:
            self._may_train = not torch.is_grad_enabled()  # it is enabled with create_graph=True
        after_backward(lambda: self._plain_calls.discard(call))


class _PlainCall:
    """A call that has run in PyTorch; autograd's graph of it holds this, and so no module."""

    def __init__(self, parts: Parts) -> None:
        self._parts = weakref.ref(parts)

    def before_backward(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Be the hook of an output."""
        parts = self._parts()
        if parts is not None:
            parts.note_backward(self)


def put_together(module: torch.nn.Module, wrapper: type) -> None:
    """Undo what `Parts.take` does."""
    for part in (module, *(part for _, part in _inside(module, wrapper))):
        leave_whole(part)


def leave_whole(module: torch.nn.Module) -> None:
    """Put the forward of a module back that is a part itself."""
    forward = vars(module).get("forward")
    if isinstance(forward, _PartForward):
        forward.leave()


class _PartForward:
    """The forward of a sub-module: in the engine where it can be captured, else its own."""

    def __init__(self, module: torch.nn.Module, parts: Parts, debug: DebugOptions) -> None:
        self._module = module
        self._parts = parts
        self._debug = debug
        self._instance_forward: Callable | None = (
            module.forward if is_script(module) else vars(module).get("forward")
        )
        self._calls: Calls | None = None

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        # `_method` is not used, because guards of a capture would read it, and so hold the module.
        forward = self._instance_forward
        if forward is None:
            forward = types.MethodType(type(self._module).forward, self._module)
        return forward(*args, **kwargs)

    @property
    def _method(self) -> Callable[..., Any]:
        own = types.MethodType(type(self._module).forward, self._module)
        return self._instance_forward or own

    @property
    def captured_forward(self) -> Callable[..., Any]:
        """Give the module's own forward, whose code a capture looks at."""
        return self._method

    def leave(self) -> None:
        """Put the module's own forward back."""
        if self._instance_forward is not None:
            self._module.forward = self._instance_forward
        else:
            del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In a trace this part belongs to a larger graph.
        if is_traced() or not self._parts.may_run():
            return self.own(*args, **kwargs)
        if self._calls is None:
            self._calls = self._make_calls()
        return self._calls(args, kwargs)

    @property
    def has_tried(self) -> bool:
        """Tell whether the module was called for the engine."""
        return self._calls is not None

    @property
    def stays_out(self) -> bool:
        """Tell whether its calls run in PyTorch from now on."""
        return self._calls is not None and self._calls.is_in_pytorch

    def _make_calls(self) -> Calls:
        calls = make_calls(self._module, self._debug, run=self.own)
        calls.instead_of_pytorch = lambda: None
        calls.is_inside = True
        calls.subject = f"a part of the module, {type(self._module).__name__},"
        return calls

    # ---- code that inspects the method finds the original one

    @property
    def __signature__(self) -> inspect.Signature:
        is_compiled = is_script(self._module)
        return signature_of(self._module) if is_compiled else inspect.signature(self._method)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_METHODS:
            return getattr(self._method, name)
        if name == "__globals__":  # torch.jit.script asks, before it looks for the source
            raise AttributeError(
                f"'{name}': forward of {type(self._module).__name__} is one that runs it in the "
                "engine, as a part of an ORTModule, which no script can call: recapture() of that "
                "ORTModule puts the module's own back"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __reduce__(self) -> tuple:
        # Copies and pickles can be read without torch_ort. The module is a part of the state,
        # because it holds this object.
        given = () if self._instance_forward is not None else (self._module,)
        function = self._instance_forward or type(self._module).forward
        return functools.partial, (function,), (function, given, {}, None)


def _inside(module: torch.nn.Module, wrapper: type) -> Iterator[tuple[str, torch.nn.Module]]:
    """Walk over sub-modules and their paths; not into wrappers, nor into scripts.

    The calls of modules inside of a script are compiled into it.
    """
    seen: set[torch.nn.Module] = set()

    def walk(outer: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
        if isinstance(outer, wrapper) or is_script(outer):
            return
        for name, part in outer.named_children():
            if part not in seen and not isinstance(part, wrapper):
                seen.add(part)
                yield f"{path}{name}", part
                yield from walk(part, f"{path}{name}.")

    return walk(module, "")


def _for_part(debug: DebugOptions, name: str) -> DebugOptions:
    """Give options under which a part writes files of its own."""
    options = copy.copy(debug)
    if debug.save_onnx:
        options.onnx_prefix = f"{debug.onnx_prefix}_{name}"
    return options
