"""Which attributes a module's forward reads, and which it changes besides tensors.

A capture bakes in what was read, so a later call has to find the same; what forward assigns would
be lost in later calls, so it is refused.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ort._C import ScriptObject
from torch_ort.core.refusals import FirstCallDiffers, NoCapture
from torch_ort.guards.number_places import AssignedNumbers, NumberPlace, is_number
from torch_ort.guards.outside_reads import (
    PLAIN,
    CodeReads,
    ObjectReads,
    is_plain,
    rows_of_value,
    snapshot,
    watched_outside,
)
from torch_ort.guards.python_draws import PythonDraws
from torch_ort.guards.scripts import guard_row, is_script, script_object
from torch_ort.guards.structure import fields_of
from torch_ort.pytorch import patches
from torch_ort.pytorch.module_compat import GLOBAL_HOOKS, is_cache

# Registries of a module. Their entries are compared, because sub-modules and hooks may be added and
# removed.
REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass
class Reads:
    """The attributes read, by module: those in its __dict__, and those that it lacked."""

    modules: dict[int, tuple[str, torch.nn.Module]]  # by id: the path and the module
    found: set[tuple[int, str]] = field(default_factory=set)
    # What was read outside of the modules; None if that is unknown.
    outside: tuple[ObjectReads, CodeReads] | None = None

    @property
    def unseen(self) -> list[str]:
        """Name what cannot be compared."""
        if self.outside is None:
            return ["globals, closures and fields of objects"]
        return sorted(self.outside[0].unseen)

    def see_argument(self, value: Any, name: str) -> None:
        """Record which fields are read of an object that a call brings."""
        if self.outside is not None:
            self.outside[0].see(value, f"argument '{name}'")

    def read_of_argument(self, value: Any) -> set[str]:
        """Give the fields that were read of it; no later call brings this object itself."""
        if self.outside is None:
            return {*fields_of(value)}
        read = self.outside[0].read_of(value)
        self.outside[0].leave(value)
        return read

    def may_have_read(self, module: torch.nn.Module, name: str) -> bool:
        """Tell whether an attribute was read, or nobody knows."""
        return self.outside is None or (id(module), name) in self.found

    def check_numbers(self) -> None:
        """Raise AssignedNumbers if forward has replaced numbers by others outside of modules."""
        changed = [each for reads in self.outside or () for each in reads.changed()]
        if changed and all(each.is_number for each in changed):
            raise AssignedNumbers(each.place for each in changed)

    def add_all(self) -> None:
        """Count every attribute of every module as read."""
        self.found |= {
            (key, name) for key, (_, part) in self.modules.items() for name in vars(part)
        }

    def rows(self) -> list[tuple[Any, Any, str, Any, str]]:
        """Give what `_C.CallGuard` compares: container, key, how, value, words."""
        rows: list[tuple[Any, Any, str, Any, str]] = [
            (hooks, None, "size", 0, "hooks of all modules") for hooks in GLOBAL_HOOKS
        ]
        for key, name in sorted(self.found):
            path, module = self.modules[key]
            if name not in REGISTRIES:
                rows += _rows_of(module, name, f"attribute {name!r} of {_called(path)}")
        for path, module in self.modules.values():
            if is_script(module):  # which attributes and sub-modules it has is fixed
                continue
            words = f"the sub-modules of {_called(path)}"
            children = tuple(module._modules.values())
            rows.append((vars(module), "_modules", "items", children, words))
            # So that no new attribute can hide one of the class.
            words = f"the number of attributes of {_called(path)}"
            rows.append((vars(module), None, "size", len(vars(module)), words))
        for reads in self.outside or ():
            rows += reads.rows()
        return rows


def _rows_of(module: torch.nn.Module, name: str, words: str) -> list[tuple]:
    own = vars(module)
    if name in own:
        return _rows_of_value(own, name, words)
    if is_script(module):
        return _rows_of_script(script_object(module), name, words)
    rows = []
    holders = [own[registry] for registry in REGISTRIES]
    if any(name in registry for registry in holders):
        # Tensors are inputs of the graph, and sub-modules are compared together.
        rows += [
            (registry, name, "is", None, words)
            for registry in holders
            if name in registry and registry[name] is None
        ]
    elif not hasattr(type(module), name):
        rows += [(container, name, "absent", None, words) for container in (own, *holders)]
    return rows


def _rows_of_script(attributes: ScriptObject, name: str, words: str) -> list[tuple]:
    if name not in attributes or isinstance(attributes[name], torch.Tensor):
        return []  # an attribute of torch's class, or an input of the graph
    return [guard_row(attributes, name, words)]


def _rows_of_value(own: dict, name: str, words: str) -> list[tuple]:
    value = own[name]
    if isinstance(value, torch.Tensor):
        return []  # an input of the graph
    if name.endswith("_hooks") and isinstance(value, dict):
        if not value:  # this is the usual case, and quick to compare
            return [(value, None, "size", 0, words)]
        return [(own, name, "items", tuple(value.values()), words)]
    return rows_of_value(own, name, value, words)


def containers_in(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give the lists, dicts and sets among a module's attributes that PyTorch does not keep."""
    for name, value in attributes.items():
        is_torchs = name in REGISTRIES or name.endswith("_hooks")
        if type(value) in (list, dict, set) and not is_torchs:
            yield name, value


def _called(path: str) -> str:
    return f"module {path!r}" if path else "the module"


_watching = threading.Lock()  # the classes of the user's objects are patched for all threads


@contextmanager
def recorded_reads(module: torch.nn.Module) -> Iterator[Reads]:
    """Record which attributes of a tree of modules are read."""
    reads = _no_reads(module)
    modules, found = reads.modules, reads.found
    parts = [part for part in module.modules() if not is_script(part)]

    def recorder(theirs: Any, self: torch.nn.Module, name: str) -> Any:
        known = modules.get(id(self))
        if known is None:
            return theirs(self, name)
        found.add((id(self), name))
        value = theirs(self, name)
        if type(value) not in PLAIN and not name.startswith("_"):
            own = object.__getattribute__(self, "__dict__")
            if name in own:
                objects.see(value, f"attribute {name!r} of {_called(known[0])}")
        return value

    with _watching, watched_outside(parts) as (objects, code):
        reads.outside = (objects, code)
        with patches.MODULE_READS.by(recorder):
            yield reads
    reads.found = {
        (key, name)
        for key, name in reads.found
        if not (name.startswith("__") and name.endswith("__"))
    }


@contextmanager
def all_reads(module: torch.nn.Module) -> Iterator[Reads]:
    """Count all attributes of a tree of modules as read."""
    reads = _no_reads(module)
    yield reads
    reads.add_all()


def _no_reads(module: torch.nn.Module) -> Reads:
    return Reads({id(part): (path, part) for path, part in module.named_modules()})


class Watch:
    """The attributes of a tree of modules, before forward runs in a capture and after each run."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts = [(path, part, dict(part.__dict__)) for path, part in module.named_modules()]
        self._registries = [
            (path, part.__dict__[name], dict(part.__dict__[name]))
            for path, part, _ in self._parts
            if not is_script(part)
            for name in REGISTRIES
        ]
        scripts = [(path, script_object(part)) for path, part, _ in self._parts if is_script(part)]
        self._scripts = [(path, attributes, dict(attributes)) for path, attributes in scripts]
        # The first call may install hooks, which are then traced as well.
        self._containers = [
            (path, name, value, snapshot(value) if is_plain(value) else copy.copy(value))
            for path, _, values in self._parts
            for name, value in containers_in(values)
        ]
        self._runs: list[dict[tuple[str, str], Any]] = []
        # Constants that forward assigns, which each call of the graph must assign too: entries,
        # name, value.
        self.constants: list[tuple[dict, str, Any]] = []

    def note_run(self) -> None:
        """Remember which constants a run of forward has assigned.

        Raises AssignedNumbers if they are numbers that differ from those of the run before.
        """
        self._runs.append(
            {
                (path, name): value
                for path, part, before in self._parts
                for name, value in part.__dict__.items()
                if isinstance(value, PLAIN) and not _is_same(value, before.get(name, _MISSING))
            }
        )
        if len(self._runs) > 1:
            earlier = self._runs[-2]
            counted = [
                NumberPlace(vars(part), name, f"attribute {name!r} of {_called(path)}")
                for path, part, before in self._parts
                for name, value in vars(part).items()
                if is_number(value)
                and type(before.get(name)) is type(value)
                and not _is_same(value, earlier.get((path, name), before[name]))
            ]
            if counted:
                raise AssignedNumbers(counted)

    def refuse_first_call(self, reads: Reads) -> None:
        """Raise FirstCallDiffers if forward has read a constant that it then gave another value.

        What it did in that run the next ones leave out.
        """
        places = {(path, name): part for path, part, _ in self._parts for name in vars(part)}
        for place in sorted({place for run in self._runs for place in run}):
            part = places.get(place)
            if part is not None and reads.may_have_read(part, place[1]):
                self.raise_for_first_call()

    def raise_for_first_call(self) -> None:
        """Raise FirstCallDiffers, unless later calls differ from each other, too.

        Everything is put back, for the call runs in eager PyTorch.
        """
        if self._unsteady():
            return
        places = [
            NumberPlace(vars(part), name, f"attribute {name!r} of {_called(path)}")
            for path, part, before in self._parts
            for name, value in vars(part).items()
            if (path, name) in self._runs[-1] and is_number(value) and is_number(before.get(name))
        ]
        self._runs.clear()
        raise FirstCallDiffers(places)

    def has_assigned(self) -> bool:
        """Tell whether the last run has assigned constants, which the next one may read."""
        return bool(self._runs and self._runs[-1])

    def take_tensors(self) -> list[tuple[dict, str, torch.Tensor]]:
        """Undo assignments of tensors to attributes and buffers by a run of forward."""
        taken = []
        places = [(part.__dict__, before) for _, part, before in self._parts]
        places += [(registry, before) for _, registry, before in self._registries]
        places += [(attributes, before) for _, attributes, before in self._scripts]
        for entries, before in places:
            for name, value in list(entries.items()):
                if isinstance(value, torch.Tensor) and value is not before.get(name, _MISSING):
                    taken.append((entries, name, value))
                    if name in before:
                        entries[name] = before[name]
                    else:
                        del entries[name]
        return taken

    def undo(self) -> list[str]:
        """Put everything back, and name what forward assigned.

        What every run sets to the same constant, as a flag that the first call sets, is left, and
        stands in `constants`: a call in PyTorch would have set it too, and the graph is that of
        later calls.
        """
        kept = dict(self._runs[-1].items() & self._runs[-2].items()) if len(self._runs) > 1 else {}
        changed = [f"{name!r} of {_called(path)}" for path, name in self._unsteady()]
        for path, part, before in self._parts:
            kept_here = {name: value for (where, name), value in kept.items() if where == path}
            self.constants += [(vars(part), name, value) for name, value in kept_here.items()]
            names = _put_back(part.__dict__, before | kept_here)
            names = [name for name in names if not is_cache(part, name)]
            changed += [f"{name!r} of {_called(path)}" for name in names]
        for path, registry, before in self._registries:
            changed += [f"{name!r} of {_called(path)}" for name in _put_back(registry, before)]
        for path, attributes, before in self._scripts:
            names = _put_back_script(attributes, before)
            changed += [f"{name!r} of {_called(path)}" for name in names]
        for path, name, value, before in self._containers:
            if not _is_same_container(value, before):
                changed.append(f"{name!r} of {_called(path)}")
                _refill(value, before)
        return sorted(set(changed))

    def _unsteady(self) -> list[tuple[str, str]]:
        """List what runs have set to different constants, even if the last one is that of before.

        A flag that forward inverts comes back with every second run.
        """
        values = {path: (vars(part), before) for path, part, before in self._parts}
        found = []
        for path, name in {place for run in self._runs for place in run}:
            entries, before = values[path]
            earlier = [run.get((path, name), before.get(name, _MISSING)) for run in self._runs]
            now = entries.get(name, _MISSING)
            if not all(_is_same(value, now) for value in earlier) and not is_number(now):
                found.append((path, name))
        return found


_MISSING = object()


@contextmanager
def unchanged_attributes(module: torch.nn.Module) -> Iterator[Watch]:
    """Put back what forward assigned to attributes, and Python's generators if it drew from them.

    Raises NoCapture if it did one of both, DrawsUnclear if another thread may have drawn.
    """
    watch = Watch(module)
    draws = PythonDraws()
    changed: list[str] = []
    try:
        yield watch
    finally:
        changed = watch.undo()
        drawn = draws.end()
    if changed:
        raise NoCapture(f"forward assigns {', '.join(changed)}, which a captured graph cannot do")
    if drawn:
        raise NoCapture(
            f"forward draws from {drawn}, whose numbers a captured graph would repeat in each call"
        )


def _put_back(entries: dict, before: dict) -> list[str]:
    changed = [
        name
        for name in [*before, *(name for name in entries if name not in before)]
        if not _is_same(entries.get(name, _MISSING), before.get(name, _MISSING))
    ]
    if changed:
        entries.clear()
        entries.update(before)
    return changed


def _put_back_script(attributes: ScriptObject, before: dict) -> list[str]:
    """Put back what can be assigned under a trace; containers are copies, so nothing changes them.

    A call that Python makes may assign anything.
    """
    changed = [
        name
        for name, value in attributes.items()
        if not (_is_same(value, before[name]) or _is_equal_part(value, before[name]))
    ]
    for name in changed:
        attributes[name] = before[name]
    return changed


def _is_equal_part(a: Any, b: Any) -> bool:
    if isinstance(a, ScriptObject) or (is_plain(a) and is_plain(b)):
        return type(a) is type(b) and a == b
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)


def _is_same_container(value: Any, before: Any) -> bool:
    if is_plain(before):
        return is_plain(value) and value == before
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is part for key, part in before.items())
    return all(a is b for a, b in zip(value, before, strict=True))


def _refill(value: Any, before: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(before)
    else:
        value.update(before)
