"""ORTModule: a module whose forward and backward run as one graph in the engine."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_ort import _C
from torch_ort.core import counting
from torch_ort.core.policy import ORTModuleTorchModelException
from torch_ort.guards.scripts import is_script
from torch_ort.guards.watch import REGISTRIES
from torch_ort.ortmodule.calls import DATA_PARALLEL, Calls, is_part_of_capture, make_calls
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.entries import Around, Entry, calls_of_thread, entry_of, has_hooks, reaches
from torch_ort.ortmodule.library_models import (
    generates_text,
    generating,
    is_library_model,
    methods_of_library,
)
from torch_ort.ortmodule.memory_stats import MemoryStats
from torch_ort.ortmodule.parts import Parts, leave_whole, put_together
from torch_ort.ortmodule.zero_stage3 import mark_blocks, run_between_gathers

# The entries of an ORTModule's own __dict__; all other attributes are the wrapped module's.
_OWN = (
    "_original", "_made_as", "_claimed", "_entries", "_calls", "_debug_options", "_bound",
    "_overrides", "_generating", "forward",
)  # fmt: skip

# Entries that other libraries store in the __dict__ of a module that they were given. Accelerate
# stores the forward that it wraps, and DeepSpeed's ZeRO stage 3 the number of gathers that are left
# in backward.
_OF_OTHERS = ("_original_forward", "applied_pre_backward_ref_cnt")


# How many functions that were assigned to `forward` are remembered, with their graphs.
MAX_FORWARDS = 8


class ORTModule(torch.nn.Module):
    """Wraps a module, whose forward and backward then run as one graph in the engine.

        model = torch_ort.ORTModule(model)
        loss = loss_fn(model(x), y)
        loss.backward()

    State, attributes and methods are those of the wrapped module (`.module`), so checkpoints,
    optimizers and training loops work unchanged. `debug_options` holds the options; see
    `DebugOptions`.

    A graph is captured at the first call, with sizes and numbers left open. It is captured again if
    something else differs that forward depends on: structure, dtype or device of the arguments,
    bools and strings among them, attributes of the module and of objects that it holds, globals,
    closures, or modes of PyTorch. Changes of other kinds need a call of `recapture()`.

    If forward does something that cannot be captured, one warning says why. From the next call on
    the largest sub-modules that can be captured run in the engine, each as a graph of its own; in
    training this begins after the first backward, and only if that backward was not itself recorded
    to be differentiated again (`create_graph=True`). The `forward` of such a sub-module is then
    replaced by an attribute of that name, until `recapture()`.

    Raises ORTModuleTorchModelException for an object that is no module, and for a DataParallel if
    the fallback policy does not allow plain PyTorch.
    """

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ORTModuleTorchModelException(
                f"ORTModule only supports torch.nn.Module, got {type(module).__name__}"
            ) from TypeError(f"want a torch.nn.Module, got {type(module).__name__}")
        super().__init__()
        self.__dict__["_original"] = module
        self.__dict__["_made_as"] = type(self)
        self.__dict__["_debug_options"] = debug_options or DebugOptions()
        self._start()
        self._warn_of_collisions()
        if self._calls.settings.enable_zero_stage3:
            mark_blocks(module, ORTModule, self._calls.logger)

    def _start(self) -> None:
        """Make what copies do not share: captured graphs, and methods bound to this object."""
        entry = self._make_entry()  # raises an error before anything has changed
        self.__dict__.pop("_generating", None)
        self.__dict__["_bound"] = self._bind_methods()
        # Code that walks over modules finds the parts of the wrapped module here.
        self.__dict__.update({name: getattr(self._original, name) for name in REGISTRIES})
        overrides = self._delegate_overrides()
        self.__dict__["_overrides"] = tuple(overrides)
        self.__dict__.update(overrides)
        self.__dict__["_entries"] = [entry]
        self._enter_forward()

    def captures_for(self, args: tuple, kwargs: dict) -> list[tuple[Any, list[Any]]]:
        """Give the captured graphs that serve a call, with what each takes of it."""
        return self._calls.captures_for(args, kwargs)

    def _make_calls(self, module: torch.nn.Module, debug: DebugOptions) -> Calls:
        around = self._around(module)
        calls = make_calls(module, debug, around)
        parts = {"is_cautious": True, "takes_whole": around is not None}
        calls.take_apart = lambda: Parts(module, ORTModule, **parts).take(debug)
        calls.take_between_gathers = lambda: run_between_gathers(
            module, ORTModule, debug, calls.logger
        )
        return calls

    def _around(self, module: torch.nn.Module) -> Callable[..., Any] | None:
        """Give a function to run in place of the wrapped module, which it calls; None for none."""
        return None

    def _configure(self, debug_options: DebugOptions) -> None:
        """Start again with other options; if they are invalid, the old ones stay in force."""
        before = self._debug_options
        self.__dict__["_debug_options"] = debug_options
        try:
            self._start()
        except Exception:
            self.__dict__["_debug_options"] = before
            raise

    # ---- forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with its hooks and this object's around it."""
        if is_part_of_capture():
            return super().__call__(*args, **kwargs)
        before = _C.forward_runs_of_thread(), calls_of_thread()
        return self._after_call(before, super().__call__(*args, **kwargs))

    def _after_call(self, before: tuple[int, int], result: Any) -> Any:
        # Not where the call was made: an error that is kept there would keep the result.
        if before == (_C.forward_runs_of_thread(), calls_of_thread()):
            self._after_bypass()
        return result

    def _after_bypass(self) -> None:
        """Count a call that did not come to the engine, and let later ones come there.

        A function that has run in place of forward, without calling it, is the module's forward.
        """
        if entry_of(self.forward, self._entries) is not None:
            self._calls.refuse_bypass()
        counting.count("calls_left_to_eager")
        if entry_of(self.forward, self._entries) is None:
            own = vars(self._original).get("forward")
            forward = own.function if isinstance(own, Around) else self.forward
            self._put_forward(self._of_module(forward))

    def _enter_forward(self) -> None:
        """Let calls go to the engine by the forward that the wrapped module has now."""
        given = vars(self._original).get("forward")
        known = next((each for each in self._entries if each.given == given), None)
        entry = known or self._make_entry()
        for each in self._entries:
            each.is_current = each is entry
        others = [each for each in self._entries if each is not entry]
        self.__dict__["_entries"] = [entry, *others][:MAX_FORWARDS]
        self.__dict__["_calls"] = entry.calls
        self.__dict__["forward"] = types.MethodType(entry.function, self)

    def _make_entry(self) -> Entry:
        module, debug = self._original, self._debug_options
        calls = self._make_calls(module, debug)
        stats = MemoryStats(module) if calls.settings.print_memory_stats else None
        return Entry(module, calls, lambda own: make_calls(module, debug, own), stats)

    def _assign_forward(self, value: Any) -> None:
        """Take a function that is assigned to `forward`.

        It becomes the wrapped module's forward, and is captured. One that may call the forward
        which it replaces runs around the engine, as the user's own code around the module.
        """
        entry = entry_of(value, self._entries)
        if entry is None and reaches(value, self._entries):
            self._put_around(value)
            return
        if entry is not None:
            self._put_forward(entry.given)
            return
        self._put_forward(self._of_module(value))

    def _put_around(self, function: Any) -> None:
        """Let a function run in place of forward, which it may call.

        If the wrapped module has hooks, they run around the function, and in eager PyTorch.
        """
        if has_hooks(self._original):
            leave_whole(self._original)
            self._original.forward = around = Around(function, self._entries[0].own)
            for each in self._entries:
                each.is_current = False
            function = around.in_hooks_of(self._original)
        self.__dict__["forward"] = function

    def _of_module(self, forward: Any) -> Any:
        """Give a function that is to be the forward of the wrapped module: a method of that."""
        if isinstance(forward, types.MethodType) and forward.__self__ is self:
            return types.MethodType(forward.__func__, self._original)
        return forward

    def _put_forward(self, given: Any) -> None:
        """Let the wrapped module have a forward of its own; None: that of its class."""
        leave_whole(self._original)
        if given is not None:
            self._original.forward = given
        elif "forward" in vars(self._original):
            del self._original.forward
        self._enter_forward()

    def _has_assigned_forward(self) -> bool:
        is_around = entry_of(self.forward, self._entries) is None
        return is_around or "forward" in vars(self._original)

    def _bind_methods(self) -> dict[str, Callable[..., Any]]:
        """Bind the user's methods to this object, so that `self(...)` in them comes here.

        Those that call `super()` stay the wrapped module's own: Python refuses them another self.
        So do those of libraries that ask for their own class (library_models.py).
        """
        if is_script(self._original):  # its methods are compiled, and its class belongs to torch
            return {}
        kind = type(self._original)
        names = _own_names(kind)
        if is_library_model(self._original):
            names -= {*methods_of_library(kind)}
        functions = {name: inspect.getattr_static(kind, name) for name in names}
        return {
            name: types.MethodType(function, self)
            for name, function in functions.items()
            if isinstance(function, types.FunctionType)
            and name != "forward"
            and not hasattr(ORTModule, name)
            and name not in vars(self._original)
            and "__class__" not in function.__code__.co_freevars
        }

    def _delegate_overrides(self) -> dict[str, Callable[..., Any]]:
        """Give torch.nn.Module's methods that the user's class overrides and this one does not."""
        if is_script(self._original):
            return {}
        kind = type(self._original)
        return {
            name: self._delegated(getattr(self._original, name))
            for name in _own_names(kind)
            if hasattr(torch.nn.Module, name)
            and name not in ("forward", *vars(ORTModule))
            and isinstance(inspect.getattr_static(kind, name), types.FunctionType)
        }

    def _delegated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self if result is self._original else result

        return call

    def _warn_of_collisions(self) -> None:
        theirs = {*vars(self._original)}
        if not is_script(self._original):
            theirs |= _own_names(type(self._original))
        for registry in REGISTRIES:
            theirs.update(dict(getattr(self._original, registry)))
        own = {*vars(ORTModule), *_OWN} - {*dir(torch.nn.Module), *REGISTRIES, "training"}
        if isinstance(self._original, ORTModule):
            return
        for name in sorted(theirs & own):
            if not _is_special(name) and name != "forward":
                warnings.warn(
                    f"ORTModule: attribute '{name}' of the wrapped module collides with one of "
                    "ORTModule's, which wins; use `.module` to reach that of the wrapped module",
                    stacklevel=3,
                )

    # ---- the wrapped module

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module itself."""
        return self._original

    def recapture(self) -> None:
        """Discard all captured graphs, so that the next call captures a new one.

        Sub-modules that run in the engine by themselves get their own `forward` back.
        """
        self._calls.recapture()
        self.__dict__.pop("_generating", None)
        put_together(self._original, ORTModule)

    @property
    def training(self) -> bool:
        """Whether the wrapped module is in training mode."""
        return self._original.training

    @training.setter
    def training(self, mode: bool) -> None:
        original = self.__dict__.get("_original")
        if original is not None:
            original.training = mode

    def _is_training(self) -> bool:
        """Tell whether a call now would train: in training mode, with gradients enabled."""
        return self.training and torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that it does not find otherwise.
        bound = self.__dict__.get("_bound")
        original = self.__dict__.get("_original")
        # What was set on the wrapped module since then hides a method of its class.
        if bound is not None and name in bound and name not in vars(original):
            return bound[name]
        if original is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if name == "generate" and name not in vars(original) and generates_text(original):
            return self._generate()
        return getattr(original, name)

    def _generate(self) -> Callable[..., Any]:
        """Give the wrapped model's `generate`, in the engine; compiled once for its forward."""
        forward, generate = self.__dict__.get("_generating", (None, None))
        if forward != self._original.forward:
            forward = self._original.forward
            generate = generating(self._original, self._calls.options)
            self.__dict__["_generating"] = forward, generate
        return generate

    @property
    def __class__(self) -> type:
        """The wrapped module's class where libraries ask for it, as of a proxy; else the own one.

        `isinstance(module, ORTModule)` holds in both cases: Python asks for the type first.
        """
        if "_claimed" in self.__dict__:
            return self._claimed
        original = self.__dict__.get("_original")
        is_own = original is None or self._is_reclassed or not is_library_model(original)
        return type(self) if is_own else type(original)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        # If somebody derives a class from the one that this object claims to have, as `fully_shard`
        # does, a class is derived from ours in the same way, and this object claims the derived
        # one.
        claimed = self.__class__
        if claimed is not type(self) and issubclass(kind, claimed):
            self.__dict__["_claimed"] = kind
            bases = tuple(type(self) if base is claimed else base for base in kind.__bases__)
            inherited = ("__dict__", "__weakref__")
            members = {name: it for name, it in vars(kind).items() if name not in inherited}
            kind = type(kind.__name__, bases, members)
        object.__dict__["__class__"].__set__(self, kind)

    @property
    def _is_reclassed(self) -> bool:
        return type(self) is not self.__dict__["_made_as"]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and "_entries" in self.__dict__:
            self._assign_forward(value)
            return
        is_own = name in ("training", "__class__", *_OF_OTHERS) or name in self.__dict__
        if is_own or "_original" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "forward" and self._has_assigned_forward():
            self._put_forward(None)
        elif name == "forward":
            delattr(self._original, name)  # as of a module to which none was assigned
        elif name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._original, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._original)})

    def __repr__(self) -> str:
        inner = repr(self._original).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  (module): {inner}\n)"

    # ---- copies, whose graphs and bound methods are made again

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # The default implementation would take `__class__` for the type.
        return _without_state, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        dropped = {
            "_entries", "_calls", "_bound", "_overrides", "_generating", "forward", *_OF_OTHERS
        }  # fmt: skip
        dropped |= {*REGISTRIES, *self._overrides}
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __deepcopy__(self, memo: dict) -> ORTModule:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    # ---- the interface of a module, which the wrapped module answers

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Raise ORTModuleTorchModelException: add modules to the module before it is wrapped."""
        raise ORTModuleTorchModelException(
            "ORTModule does not support adding modules to it"
        ) from NotImplementedError("add_module")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing but log that the module runs as one graph already."""
        self._calls.log("compile(): ignored, because an ORTModule runs as one graph already")

    def _replicate_for_data_parallel(self) -> Any:
        raise ORTModuleTorchModelException(DATA_PARALLEL) from NotImplementedError(
            "_replicate_for_data_parallel"
        )

    def _apply(self, fn: Callable, recurse: bool = True) -> ORTModule:
        self._original._apply(fn, recurse)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> ORTModule:
        """See torch.nn.Module."""
        self._original.apply(fn)
        return self

    def train(self, mode: bool = True) -> ORTModule:
        """See torch.nn.Module."""
        self._original.train(mode)
        return self

    def eval(self) -> ORTModule:
        """See torch.nn.Module."""
        self._original.eval()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See torch.nn.Module."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See torch.nn.Module."""
        return self._original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._original._load_from_state_dict(*args, **kwargs)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """See torch.nn.Module."""
        self._original.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        """See torch.nn.Module."""
        self._original.register_parameter(*args, **kwargs)

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """See torch.nn.Module."""
        return self._original.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """See torch.nn.Module."""
        return self._original.get_buffer(target)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """See torch.nn.Module."""
        return self._original.get_submodule(target)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """See torch.nn.Module."""
        return self._original.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """See torch.nn.Module."""
        return self._original.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """See torch.nn.Module."""
        return self._original.buffers(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """See torch.nn.Module."""
        return self._original.named_buffers(*args, **kwargs)

    def children(self) -> Iterator[torch.nn.Module]:
        """See torch.nn.Module."""
        return self._original.children()

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """See torch.nn.Module."""
        return self._original.named_children()

    def modules(self) -> Iterator[torch.nn.Module]:
        """See torch.nn.Module."""
        return (module for _, module in self.named_modules())

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Give the wrapped module's, with this object as the first if its class was replaced.

        `fully_shard` does, and looks for what it has re-classed when it walks over modules.
        """
        for name, module in self._original.named_modules(*args, **kwargs):
            yield name, self if module is self._original and self._is_reclassed else module


def _without_state(kind: type[ORTModule]) -> ORTModule:
    return kind.__new__(kind)


def _own_names(kind: type) -> set[str]:
    """Name the attributes of a class and its bases, without those of torch.nn.Module."""
    bases = [base for base in kind.__mro__ if base not in torch.nn.Module.__mro__]
    return {name for base in bases for name in vars(base) if not _is_special(name)}


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
