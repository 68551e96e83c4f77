"""What forward reads besides its modules: fields of other objects, globals and closures.

A capture bakes in what was read, so a later call has to find the same. Objects of Python's own
classes tell which of their fields are read, while their class is patched; of functions the code
tells which globals and closures they name.
"""

from __future__ import annotations

import enum
import functools
import os
import sysconfig
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_ort.core.refusals import NoCapture
from torch_ort.core.user_code import OUR_FOLDER, TORCH_FOLDER
from torch_ort.guards.number_places import AssignedNumbers, NumberPlace, is_number
from torch_ort.guards.structure import fields_of

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, range)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_MISSING = object()
_LIBRARIES = ("torch", "torch_ort", "numpy", "logging", "threading", "functools", "collections")
_NUMPY_FOLDER = os.path.join(sysconfig.get_paths()["platlib"], "numpy", "")
_FOLDERS = (TORCH_FOLDER, OUR_FOLDER, _NUMPY_FOLDER)
_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")
_NEVER_DATA = (
    torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, functools.partial, enum.Enum, torch.Generator, torch.SymInt,
    torch.SymFloat, *PLAIN,
)  # fmt: skip

Row = tuple[Any, Any, str, Any, str]  # of `_C.CallGuard`: container, key, how, value, words


def is_plain(value: Any) -> bool:
    """Tell whether a value is a constant, or a container of constants."""
    if isinstance(value, dict):
        return all(is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, _CONTAINERS):
        return all(is_plain(part) for part in value)
    return isinstance(value, PLAIN)


def snapshot(value: Any) -> Any:
    """Copy containers, whose contents may change in place."""
    if type(value) is dict:
        return {key: snapshot(part) for key, part in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(snapshot(part) for part in value)
    return value


def rows_of_value(own: Any, name: Any, value: Any, words: str) -> list[Row]:
    """Give a guard of the value at `own[name]`."""
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, dict) and type(value) is not dict:  # others are copied as they are
        parts = [
            row
            for key, part in value.items()
            for row in rows_of_value(value, key, part, f"item {key!r} of {words}")
        ]
        size = (value, None, "size", len(value), f"the number of parts of {words}")
        return [(own, name, "is", value, words), *parts, size]
    if is_plain(value):
        return [(own, name, "equals", snapshot(value), words)]
    rows: list[Row] = [(own, name, "is", value, words)]
    if type(value) in (list, dict):  # it holds tensors, or it would be plain
        rows.append((value, None, "size", len(value), f"the number of parts of {words}"))
    return rows


def _rows_of_constant(own: Any, name: Any, value: Any, words: str) -> list[Row]:
    """Give what compares a value outside of the modules, where tensors are no inputs of a graph."""
    if isinstance(value, torch.Tensor):
        return [(own, name, "is", value, words)]
    rows = rows_of_value(own, name, value, words)
    if type(value) in (list, dict) and not is_plain(value):
        for key, part in value.items() if type(value) is dict else enumerate(value):
            if isinstance(part, torch.Tensor) or type(part) in (list, dict):
                rows += _rows_of_constant(value, key, part, f"item {key!r} of {words}")
    return rows


@dataclass
class _Object:
    """An object that forward has got hold of."""

    value: Any
    words: str
    before: dict[str, Any]  # its fields
    read: set[str] = field(default_factory=set)
    is_read_whole: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        return object.__getattribute__(self.value, "__dict__")

    def rows(self) -> list[Row]:
        """Compare the fields that were read."""
        fields, rows = self.fields, []
        hidden = {name for name in self.read if name not in fields and not self._is_of_class(name)}
        # A class may read a field by another name.
        is_whole = self.is_read_whole or any(self._is_made(name) for name in hidden)
        for name in sorted(fields) if is_whole else sorted(self.read & fields.keys()):
            words = f"field {name!r} of {self.words}"
            rows += _rows_of_constant(fields, name, fields[name], words)
        rows += [
            (fields, name, "absent", None, f"field {name!r} of {self.words}")
            for name in sorted(hidden)
        ]
        return rows

    def _is_of_class(self, name: str) -> bool:
        return any(name in vars(kind) for kind in type(self.value).__mro__)

    def _is_made(self, name: str) -> bool:
        return getattr(self.value, name, _MISSING) is not _MISSING

    def changed(self) -> list[_Changed]:
        """Give what forward has assigned that later calls would not."""
        fields, before = self.fields, self.before
        return [
            _Changed(
                NumberPlace(fields, name, f"field {name!r} of {self.words}"),
                before.get(name, _MISSING), value,
            )
            for name, value in fields.items()
            if _is_lost(before.get(name, _MISSING), value)
        ]  # fmt: skip


class _Changed(NamedTuple):
    """What forward has assigned, and where."""

    place: NumberPlace
    before: Any
    value: Any

    @property
    def is_number(self) -> bool:
        """Tell whether one number has been replaced by another, in a dict."""
        is_same_type = type(self.before) is type(self.value)
        return is_number(self.value) and is_same_type and isinstance(self.place.entries, dict)

    def put_back(self) -> None:
        """Let the place hold what it held before."""
        entries, name, _ = self.place
        if not isinstance(entries, dict):
            entries.cell_contents = self.before
        elif self.before is _MISSING:
            del entries[name]
        else:
            entries[name] = self.before


def _is_lost(before: Any, now: Any) -> bool:
    """Tell whether forward has replaced a value by a tensor or by another number."""
    if now is before or type(before) in (torch.SymInt, torch.SymFloat):
        return False  # the latter stood for a number that calls bring
    if isinstance(now, torch.Tensor):
        return True
    is_number = isinstance(now, int | float) and not isinstance(now, bool)
    return is_number and not (type(now) is type(before) and now == before)


class ObjectReads:
    """The fields that are read of objects, from when they are seen."""

    def __init__(self) -> None:
        self.unseen: set[str] = set()  # things that nothing can compare
        self.is_paused = False
        self._objects: dict[int, _Object] = {}  # by id
        self._patched: dict[type, Any] = {}  # with the attributes that were replaced
        self._is_data: dict[type, bool] = {}

    def see(self, value: Any, words: str) -> None:
        """Watch an object from now on, or those in a list or dict of them."""
        kind = type(value)
        if kind in (list, tuple):
            for i, part in enumerate(value):
                if type(part) not in PLAIN:
                    self._see_one(part, f"item {i} of {words}")
        elif kind is dict:
            for key, part in value.items():
                if type(part) not in PLAIN:
                    self._see_one(part, f"item {key!r} of {words}")
        else:
            self._see_one(value, words)

    def _see_one(self, value: Any, words: str) -> None:
        kind = type(value)
        is_data = self._is_data.get(kind)
        if is_data is None:
            is_data = self._is_data[kind] = _is_data_class(kind)
        if not is_data:
            is_known = issubclass(kind, _NEVER_DATA) or _is_of_libraries(kind) or is_plain(value)
            if not is_known:
                self.unseen.add(f"{words} ({kind.__name__})")
            return
        if id(value) in self._objects:
            return
        seen = _Object(value, words, dict(object.__getattribute__(value, "__dict__")))
        seen.is_read_whole = not self._patch(kind)
        self._objects[id(value)] = seen

    def _patch(self, kind: type) -> bool:
        """Let a class tell what is read of its objects; some of C's cannot."""
        if kind in self._patched:
            return True
        theirs = vars(kind).get("__getattribute__", _MISSING)
        reads, objects, see = self, self._objects, self.see

        # Other threads may read fields as well; then more is compared than necessary.
        def recorder(self: Any, name: str) -> Any:
            found = None if reads.is_paused else objects.get(id(self))
            if found is not None and not (name.startswith("__") and name.endswith("__")):
                found.read.add(name)
            elif found is not None and name == "__dict__":
                found.is_read_whole = True
            if theirs is _MISSING:
                value = super(kind, self).__getattribute__(name)
            else:
                value = theirs(self, name)
            if found is not None and type(value) not in PLAIN:
                see(value, f"field {name!r} of {found.words}")
            return value

        try:
            kind.__getattribute__ = recorder
        except TypeError:
            return False
        self._patched[kind] = theirs
        return True

    def unpatch(self) -> None:
        """Let classes be what they were."""
        for kind, theirs in self._patched.items():
            if theirs is _MISSING:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = theirs
        self._patched = {}

    def rows(self) -> list[Row]:
        """Give what `_C.CallGuard` compares."""
        return [row for seen in self._objects.values() for row in seen.rows()]

    def read_of(self, value: Any) -> set[str]:
        """Give the names of the fields that were read of an object; all if that is unknown."""
        seen = self._objects.get(id(value))
        is_whole = seen is None or seen.is_read_whole
        return {*fields_of(value)} if is_whole else seen.read

    def leave(self, value: Any) -> None:
        """Watch an object no more."""
        self._objects.pop(id(value), None)

    def note_values(self) -> None:
        """Take what the fields hold now for what they held before."""
        for seen in self._objects.values():
            seen.before = dict(seen.fields)

    def changed(self) -> list[_Changed]:
        """Give what forward has assigned."""
        return [changed for seen in self._objects.values() for changed in seen.changed()]


def _is_data_class(kind: type) -> bool:
    if issubclass(kind, _NEVER_DATA) or _is_of_libraries(kind):
        return False
    is_of_python = bool(kind.__flags__ & 1 << 9) or kind is types.SimpleNamespace  # a heap type
    return is_of_python and "__dict__" in dir(kind)


def _is_of_libraries(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


class _Place(NamedTuple):
    """Where a function's code finds a value: a global's dict and name, or a cell."""

    container: Any
    key: Any
    words: str

    def get(self) -> Any:
        if isinstance(self.container, dict):
            return self.container.get(self.key, _MISSING)
        try:
            return self.container.cell_contents
        except ValueError:  # the cell has no value yet
            return _MISSING


class CodeReads:
    """The globals and closures that the code of functions names, and of those that it calls."""

    def __init__(self, objects: ObjectReads) -> None:
        self._objects = objects
        self._seen: set[int] = set()  # ids of functions
        self._places: dict[tuple[int, Any], tuple[_Place, Any]] = {}  # with the value found first

    def add_module(self, module: torch.nn.Module) -> None:
        """Add what runs when a module is called."""
        own = vars(module)
        forward = own.get("forward", type(module).forward)
        # An object that stands in place of the forward that is captured names that one.
        self.add(getattr(forward, "captured_forward", forward), type(module))
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            for hook in own[hooks].values():
                self.add(hook, type(module))
        for value in own.values():
            self.add(value, type(module))

    def add(self, function: Any, owner: type | None = None) -> None:
        """Add a function, and what it calls by name; `owner` has the methods that it calls."""
        while isinstance(function, types.MethodType | functools.partial):
            is_method = isinstance(function, types.MethodType)
            owner = type(function.__self__) if is_method else owner
            function = function.__func__ if is_method else function.func
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return
        if _is_of_library(function.__code__):
            return
        self._seen.add(id(function))
        names = _names_of(function.__code__)
        where = f"of '{function.__qualname__}'"
        for name in names:
            if name in function.__globals__:
                self._note(_Place(function.__globals__, name, f"global {name!r} {where}"), names)
            elif owner is not None:
                self.add(_method(owner, name), owner)
        cells = zip(function.__closure__ or (), function.__code__.co_freevars, strict=True)
        for cell, name in cells:
            self._note(_Place(cell, None, f"closure {name!r} {where}"), names)

    def _note(self, place: _Place, names: tuple[str, ...]) -> None:
        key = (id(place.container), place.key)
        value = place.get()
        if key in self._places or value is _MISSING:
            return
        self._places[key] = (place, value)
        if isinstance(value, types.ModuleType):
            if not _is_library_module(value):
                for name in names:
                    if name in vars(value):
                        words = f"'{value.__name__}.{name}'"
                        self._note(_Place(vars(value), name, words), names)
        else:
            self.add(value)
            self._objects.see(value, place.words)

    def rows(self) -> list[Row]:
        """Give what `_C.CallGuard` compares."""
        rows: list[Row] = []
        for place, _ in self._places.values():
            value = place.get()
            if value is _MISSING or isinstance(value, types.ModuleType | type):
                continue
            rows += _rows_of_constant(place.container, place.key, value, place.words)
        return rows

    def note_values(self) -> None:
        """Take the present values as those to compare with, and to restore."""
        for key, (place, _) in self._places.items():
            self._places[key] = (place, place.get())

    def changed(self) -> list[_Changed]:
        """Give what forward has assigned."""
        return [
            _Changed(NumberPlace(*place), before, place.get())
            for place, before in self._places.values()
            if _is_lost(before, place.get())
        ]


def _names_of(code: types.CodeType) -> tuple[str, ...]:
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType)
             for name in _names_of(part)]  # fmt: skip
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _method(owner: type, name: str) -> Any:
    for kind in owner.__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            if isinstance(found, property):
                return found.fget
            return getattr(found, "__func__", found)
    return None


def _is_of_library(code: types.CodeType) -> bool:
    name = code.co_filename
    is_standard = name.startswith(_STANDARD) and "-packages" not in name
    return is_standard or name.startswith((*_FOLDERS, "<frozen"))


def _is_library_module(module: types.ModuleType) -> bool:
    name = getattr(module, "__file__", None)
    if name is None:
        return True
    is_standard = name.startswith(_STANDARD) and "-packages" not in name
    return is_standard or name.startswith(_FOLDERS)


_thread = threading.local()  # `watch`: of the capture that runs in this thread


@contextmanager
def not_watched() -> Iterator[None]:
    """Do not watch the block, which each call of the graph runs again with its own reads."""
    watch = getattr(_thread, "watch", None)
    if watch is None:
        yield
        return
    objects, code = watch
    before, objects.is_paused = objects.is_paused, True
    try:
        yield
    finally:
        objects.is_paused = before
        objects.note_values()
        code.note_values()


@contextmanager
def watched_outside(modules: list[torch.nn.Module]) -> Iterator[tuple[ObjectReads, CodeReads]]:
    """Watch what the forwards of modules read outside of them.

    Raises NoCapture if they assign there what later calls would have to assign again:
    AssignedNumbers if these are numbers alone.
    """
    objects = ObjectReads()
    code = CodeReads(objects)
    changed: list[_Changed] = []
    failure: Exception | None = None
    _thread.watch = (objects, code)
    try:
        for module in modules:
            code.add_module(module)
        yield objects, code
    except Exception as error:
        failure = error
    finally:
        _thread.watch = None
        objects.unpatch()
        changed = objects.changed() + code.changed()
        for each in changed:
            each.put_back()
    if changed:  # that may be why the capture has failed
        if all(each.is_number for each in changed):
            raise AssignedNumbers(each.place for each in changed) from failure
        names = ", ".join(sorted(each.place.words for each in changed))
        raise NoCapture(f"forward assigns {names}, which a captured graph cannot do") from failure
    if failure is not None:
        raise failure
