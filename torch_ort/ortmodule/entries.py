"""The forward of an ORTModule, which goes to the engine, and functions that are assigned to it."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torch_ort import _C
from torch_ort.core import counting
from torch_ort.guards.scripts import signature_of
from torch_ort.ortmodule.calls import Calls, is_part_of_capture
from torch_ort.ortmodule.memory_stats import MemoryStats


class _Here(threading.local):
    calls = 0  # of entries, in this thread


_here = _Here()


def calls_of_thread() -> int:
    """Tell how often this thread has called an entry."""
    return _here.calls


class Entry:
    """The wrapped module with the forward that it has now, as a method of an ORTModule.

    Code that has kept the method calls what it was then: the module's own forward after another one
    was assigned, too.
    """

    def __init__(
        self, module: torch.nn.Module, calls: Calls, make_inside: Callable[[Any], Calls],
        stats: MemoryStats | None,
    ) -> None:  # fmt: skip
        self.given = vars(module).get("forward")  # the module's; None for that of its class
        self.calls = calls
        self.is_current = True
        self.function = self._make_function(module)
        self.own = module.forward
        self._make_inside = make_inside
        self._inside: Calls | None = None
        self._stats = stats

    def _make_function(self, module: torch.nn.Module) -> Callable[..., Any]:
        entry = self

        @functools.wraps(module.forward)
        def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return entry.run(args, kwargs)

        # Libraries that unwrap what they have wrapped, such as Accelerate, must stop here.
        del forward.__wrapped__
        # Trainers drop columns of a data set that forward has no parameter for.
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        of_module = signature_of(module)
        forward.__signature__ = of_module.replace(parameters=[own, *of_module.parameters.values()])
        return forward

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Run a call; counts it if nothing of it ran in the engine, and may raise then."""
        if is_part_of_capture():
            return self.calls(args, kwargs) if self.is_current else self.own(*args, **kwargs)
        _here.calls += 1
        calls = self.calls if self.is_current else self._calls_inside()
        return _counted(
            calls, _C.forward_runs_of_thread(), self._run_measured(calls, args, kwargs)
        )  # fmt: skip

    def _run_measured(self, calls: Calls, args: tuple, kwargs: dict) -> Any:
        if self._stats is None:
            return calls(args, kwargs)
        self._stats.before_forward()
        result = calls(args, kwargs)
        self._stats.after_forward(result)
        return result

    def _calls_inside(self) -> Calls:
        """Give what runs this forward inside of the one that has taken its place.

        The module's hooks run around that one.
        """
        if self._inside is None:
            self._inside = self._make_inside(self.own)
            self._inside.is_inside = True
            self._inside.subject = "the forward that was replaced"
        return self._inside


class Around:
    """A function in place of a module's forward, which it may call: inside of it the engine runs.

    It is the forward of the wrapped module, so that hooks of that run around it.
    """

    def __init__(self, function: Callable[..., Any], own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.captured_forward = own  # which is what a capture looks at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        return self.function(*args, **kwargs)

    def in_hooks_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Give what runs the function in the hooks of the module that has it.

        Once another function has taken its place, which may call it, that one is inside of them.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            is_inside = vars(module).get("forward") is not self
            return self.function(*args, **kwargs) if is_inside else module(*args, **kwargs)

        if not isinstance(self.function, types.MethodType):
            return functools.update_wrapper(run, self.function)

        @functools.wraps(self.function.__func__)
        def forward(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        return types.MethodType(forward, self.function.__self__)

    def __reduce__(self) -> tuple:
        # Copies have the module's own: the function would call the ORTModule that was copied.
        own = self.captured_forward
        if not isinstance(own, types.MethodType):
            return functools.partial, (own,)
        return functools.partial, (own.__func__,), (own.__func__, (own.__self__,), {}, None)


def _counted(calls: Calls, runs: int, result: Any) -> Any:
    # In the frame of the call, an error that is kept would keep the result.
    if _C.forward_runs_of_thread() == runs:
        counting.count("calls_left_to_eager")
        calls.refuse_silence()
    return result


def entry_of(value: Any, entries: Iterable[Entry]) -> Entry | None:
    """Give the entry that a function or a method of an ORTModule is; None if it is another one."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    return next((each for each in entries if each.function is function), None)


def reaches(value: Any, entries: list[Entry]) -> bool:
    """Tell whether a function holds an entry, and so may call it.

    Modules are not looked into: each function of a library may hold the model.
    """
    todo, seen = [value], set()
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, torch.nn.Module | torch.Tensor | type):
            continue
        seen.add(id(each))
        if entry_of(each, entries) is not None:
            return True
        todo += _held_by(each)
    return False


def has_hooks(module: torch.nn.Module) -> bool:
    """Tell whether a module has hooks of its own, which run around its forward."""
    return any(
        (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
    )


def _held_by(value: Any) -> Iterator[Any]:
    """Give what a function, or an object that is called like one, calls or refers to."""
    if isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_full(cell))
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif callable(value):
        yield from getattr(value, "__dict__", {}).values()  # with `__wrapped__`


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the function that it belongs to has not assigned it yet
        return False
