"""Hooks of modules: those that only compute are captured, others have to run in each call.

A hook may store what it sees, count, or print. A captured graph would run its Python once, on
tensors without data; so whatever may do more than compute its result keeps a call out of the
engine. What it may do is read from its code.
"""

from __future__ import annotations

import builtins
import dis
import math
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from torch_ort._C import Unsupported
from torch_ort.core.refusals import NoCapture
from torch_ort.guards.scripts import is_script
from torch_ort.pytorch.module_compat import GLOBAL_HOOKS, OPERATORS
from torch_ort.pytorch.trace_compat import is_traced

# Hooks of these packages only compute, or are made for captures, or pass what they keep to the
# surrounding forward, which returns it.
_KNOWN = ("torch.nn.utils.", "torch_ort.", "transformers.utils.output_capturing.")
_SHARDING = "torch.distributed.fsdp."
_PARALLEL = "torch.distributed.tensor."
_PURE_BUILTINS = {
    getattr(builtins, name)
    for name in (
        "abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len",
        "list", "max", "min", "range", "reversed", "round", "sum", "tuple", "zip",
    )
}  # fmt: skip
_PLAIN = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format,
)  # fmt: skip
# Where the functions of torch are that work on tensors and have no effects.
_FUNCTIONS = (OPERATORS, torch.functional, torch.nn.functional, torch.linalg, torch.special)
_PLACES = (torch, torch.nn, *_FUNCTIONS[1:], math)
_CHANGES = {  # instructions
    "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL",
    "DELETE_GLOBAL", "IMPORT_NAME", "IMPORT_FROM",
}  # fmt: skip
_REGISTERING = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}
_OF_TENSORS = (
    set(dir(torch.Tensor)) - {function.__name__ for function in _REGISTERING} - {"backward"}
)


class HookWithEffects(NamedTuple):
    """A forward hook that may do more than compute: which one, and whether it is fully_shard's."""

    words: str
    is_of_shards: bool = False


def hook_with_effects(
    module: torch.nn.Module, *, of_parts_alone: bool = False
) -> HookWithEffects | None:
    """Find a forward hook in a tree of modules that may do more than compute.

    Those of scripts are compiled into them. `of_parts_alone` leaves out those of the module itself,
    for a call of what is inside of them. Those of fully_shard come last: they stay for good, while
    others may be taken off again.
    """
    if any(GLOBAL_HOOKS):
        return HookWithEffects("a hook for all modules is registered (torch.nn.modules.module)")
    of_shards = None
    for path, part in module.named_modules():
        if is_script(part) or (part is module and of_parts_alone):
            continue
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            name = f"module '{path}'" if path else "the module"
            if f"{hook.__module__}.".startswith(_PARALLEL):
                continue  # see is_parallel
            if f"{hook.__module__}.".startswith(_SHARDING):
                words = f"{name} has a forward hook, {_named(hook)}"
                of_shards = of_shards or HookWithEffects(words, is_of_shards=True)
            elif not only_computes(hook, part):
                return HookWithEffects(f"{name} has a forward hook, {_named(hook)}")
    return of_shards


def is_parallel(part: torch.nn.Module) -> bool:
    """Tell whether parallelize_module has split a module over ranks."""
    hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    return any(f"{hook.__module__}.".startswith(_PARALLEL) for hook in hooks)


def gathered_part(module: torch.nn.Module) -> str:
    """Name a part around whose calls DeepSpeed's ZeRO stage 3 gathers parameters; empty: none."""
    # Hooks on the module itself run around its own call, so only its parts are looked at.
    parts = ((path, part) for path, part in module.named_modules() if part is not module)
    return next((path for path, part in parts if "ds_id" in vars(part)), "")


def only_computes(hook: Callable[..., Any], module: torch.nn.Module | None = None) -> bool:
    """Tell whether a hook does no more than compute a result from tensors, as far as can be seen.

    `module` is what a hook of a module reads attributes of.
    """
    kind = hook if isinstance(hook, types.FunctionType) else type(hook)
    if f"{kind.__module__}.".startswith(_KNOWN):
        return True
    return isinstance(hook, types.FunctionType) and _is_pure(hook, hook.__code__, module)


def _is_pure(
    hook: types.FunctionType, code: types.CodeType, module: torch.nn.Module | None
) -> bool:  # fmt: skip
    outside = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    for step in dis.get_instructions(code):
        name, value = step.argval, None
        is_outside = step.opname.endswith("_DEREF") and name in outside
        if step.opname in _CHANGES or (is_outside and not step.opname.startswith("LOAD_")):
            return False
        if is_outside:
            value = outside[name].cell_contents
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = hook.__globals__.get(name, getattr(builtins, name, None))
        is_read = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if not _is_harmless(value) or (is_read and not _may_be_read(name, module)):
            return False
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return all(_is_pure(hook, each, module) for each in inner)


def _is_harmless(value: Any) -> bool:
    """Tell whether reading or calling something changes nothing."""
    if isinstance(value, _PLAIN) or any(value is place for place in _PLACES):
        return True
    if not callable(value):
        return False
    name = getattr(value, "__name__", "")
    return value in _PURE_BUILTINS or any(
        getattr(place, name, None) is value for place in (*_FUNCTIONS, math)
    )


def _may_be_read(name: str, module: torch.nn.Module | None) -> bool:
    """Tell whether an attribute is a tensor's, a function of torch's, or plain in the module."""
    if name in _OF_TENSORS or any(hasattr(place, name) for place in (*_FUNCTIONS, math)):
        return True
    of_torch = getattr(torch, name, None)
    if isinstance(of_torch, _PLAIN[1:]) or any(of_torch is place for place in _PLACES):
        return True
    value = getattr(module, name, _MISSING)
    return name in ("functional", "nn") or isinstance(value, (*_PLAIN, torch.Tensor))


_MISSING = object()


def _named(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    if f"{hook.__module__}.".startswith(_SHARDING):
        return f"'{hook.__name__}' of fully_shard, which takes an ORTModule and no part of one"
    if code is None:
        return f"a {type(hook).__qualname__}"
    return f"'{hook.__name__}' ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


class _TensorHooks(TorchFunctionMode):
    """Refuses what a tensor of the trace would forget."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Call a function of torch's."""
        if func == _SET_DATA and args[0].requires_grad and not _is_made_inside(args[0]):
            raise NoCapture(
                "forward assigns to `data` of an argument or a parameter, which a trace would lose"
            )
        if func in _REGISTERING and is_traced(args[0]):
            why = f"forward calls Tensor.{func.__name__}"
            if not _is_made_inside(args[0]):
                raise NoCapture(
                    f"{why} of an argument or a parameter, which keeps it after the call"
                )
            if not _is_kept(func, args):
                raise Unsupported(
                    f"{why}, whose effect a captured graph would not have at each backward"
                )
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__


def _is_made_inside(tensor: torch.Tensor) -> bool:
    """Tell whether a traced tensor is no input of the graph.

    What is put on an input gets gradients that come from outside of the graph as well. In a trace
    of AOTAutograd inputs have a node that raises.
    """
    return not tensor.is_leaf and type(tensor.grad_fn).__name__ != "Error"


def _is_kept(func: Any, args: tuple) -> bool:
    return func is torch.Tensor.register_hook and len(args) == 2 and only_computes(args[1])


@contextmanager
def tensor_hooks_refused() -> Iterator[None]:
    """Refuse hooks on tensors of traces made in the block, unless they only compute."""
    with _TensorHooks():
        yield
