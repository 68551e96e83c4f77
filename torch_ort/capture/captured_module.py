"""A captured module: which calls its graph serves, and how it serves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort.capture.module_function import ModuleFunction
from torch_ort.guards.number_places import NumberPlace
from torch_ort.guards.structure import Structure
from torch_ort.steps.recorded import RecordedRun, RecordedStep


class ModuleCapture:
    """A graph captured from a module, for calls like the one it was made from."""

    def __init__(
        self, function: ModuleFunction, guard: _C.CallGuard, run: Callable[..., Sequence[Any]],
        conditions: Sequence[str], written: dict[int, bool], switched: dict[int, bool],
        uncopied: dict[int, str], unseen: Sequence[str],
        constant_numbers: Sequence[tuple[NumberPlace, int | float]],
    ) -> None:  # fmt: skip
        self.run = run
        # The numbers in attributes that are constants of the graph.
        self.constant_numbers = constant_numbers
        # What forward reads and no guard can compare.
        self.unseen = unseen
        self.is_recorded = isinstance(run, RecordedStep | RecordedRun)
        self._guard = guard
        self._num_integers = len(function.integers)
        self._taken = function.open_integers
        self._open_numbers = function.open_numbers
        before = self._num_integers + len(function.held.names)
        self._numbers = {name: before + i for name, i in function.numbers.items()}
        self._asked = function.asked
        self._symbols = function.symbols  # by position among the integers
        # The symbols of sizes that may vary, by tensor and dim.
        open_integers = frozenset(function.open_integers)
        self.open_sizes = {
            place: function.symbols[i] for place, i in function.sizes.items() if i in open_integers
        }
        first = len(function.open_integers) + len(function.held.names)
        # If results are made of arguments, they must be made of the caller's own, not of dense
        # copies.
        self._gives_arguments = self.is_recorded and any(i >= first for i in run.results.inputs)
        self._outputs = function.outputs
        self._assigned = function.assigned
        self._fields = function.fields
        self._constants = function.watch.constants
        self._assigns = bool(self._fields or self._assigned or self._constants)
        self._written = written
        self._switched = switched
        self._uncopied = uncopied
        self._words = " and ".join(conditions)
        self._holds = _condition(function.symbols, self._words) if conditions else None

    def match(self, args: tuple, kwargs: dict) -> list[Any] | None:
        """Give integers and sizes, the module's tensors and the call's; None if nothing fits."""
        kwargs = self._open_numbers.brought_by(kwargs)
        flat = self._guard.match(args, kwargs)
        if flat is None or (self._holds and not self._holds(*flat[: self._num_integers])):
            return None
        if self._asked and not self._numbers_hold(flat):
            return None
        if (self._written or self._uncopied) and self._refused(args, kwargs, flat):
            return None
        return flat

    def mismatch(self, args: tuple, kwargs: dict) -> str:
        """Say what keeps the graph from serving a call; empty if nothing does."""
        kwargs = self._open_numbers.brought_by(kwargs)
        why = self._guard.mismatch(args, kwargs)
        if why:
            return why
        flat = self._guard.match(args, kwargs)
        if self._holds and not self._holds(*flat[: self._num_integers]):
            return f"sizes: want {self._words}"
        if self._asked and not self._numbers_hold(flat):
            return f"numbers: want {self._asked}"
        return self._refused(args, kwargs, flat)

    def _numbers_hold(self, flat: Sequence[Any]) -> bool:
        return self._asked.hold_for(self._values_of(flat), self._sizes_of(flat))

    def _sizes_of(self, flat: Sequence[Any]) -> dict[str, int]:
        """Give the sizes that a call brings, by symbol."""
        return dict(zip(self._symbols, flat, strict=False))

    def _values_of(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Give the numbers that a call brings, by name."""
        return {name: flat[i].item() for name, i in self._numbers.items()}

    def _refused(self, args: tuple, kwargs: dict, flat: Sequence[Any]) -> str:
        given = {id(leaf) for leaf in Structure((args, kwargs), "").leaves}
        for position, why in self._uncopied.items():
            if id(flat[position]) not in given:
                return why
        return refused_write(given, flat, self._written)

    def call(self, flat: list[Any], args: tuple, kwargs: dict) -> Any:
        """Run the graph with what `match` gave for a call; give the module's result."""
        for position, is_set in self._switched.items():
            flat[position].requires_grad_(is_set)
        if self._open_numbers.has_assigned:
            numbers, sizes = self._values_of(flat), self._sizes_of(flat)
            result = self._call(flat, args, kwargs)
            self._open_numbers.assign(numbers, sizes)
            return result
        return self._call(flat, args, kwargs)

    def _call(self, flat: list[Any], args: tuple, kwargs: dict) -> Any:
        if len(self._taken) < self._num_integers:
            flat = [*(flat[i] for i in self._taken), *flat[self._num_integers :]]
        if not self._gives_arguments:
            return self._rebuild(self.run(*flat), args, kwargs)
        tensors = self._guard.tensors(args, self._open_numbers.brought_by(kwargs))
        given = [*flat[: len(flat) - len(tensors)], *tensors]
        return self._rebuild(self.run(*flat, given=given), args, kwargs)

    @property
    def conditions(self) -> str:
        """Give the conditions on sizes as Python, by their symbols; empty if there are none."""
        return self._words

    def holds_for(self, flat: list[Any], sizes: Mapping[str, int]) -> bool:
        """Tell whether the conditions hold for a call's sizes with others for some symbols."""
        values = [
            sizes.get(symbol, value) for symbol, value in zip(self._symbols, flat, strict=False)
        ]
        return not self._holds or self._holds(*values)

    def integers_of(self, flat: list[Any]) -> list[int]:
        """Give the integers and sizes of a call from what `match` gave."""
        return flat[: self._num_integers]

    def refuse_empty(self) -> None:
        """Serve no call with a size of 0 from now on."""
        holds = self._holds or (lambda *integers: True)
        self._words = " and ".join(filter(None, [self._words, "no size of 0"]))
        self._holds = lambda *integers: 0 not in integers and holds(*integers)

    def _rebuild(self, results: Sequence[Any], args: tuple, kwargs: dict) -> Any:
        """Give a call's result from those of the graph, and do the assignments of forward."""
        if self._assigns:
            self._assign(results, args, kwargs)
        return self._outputs.rebuild(results)

    def _assign(self, results: Sequence[Any], args: tuple, kwargs: dict) -> None:
        count = len(results) - self._fields.num_tensors
        self._fields.assign(args, kwargs, results[count:])
        tensors = results[count - len(self._assigned) : count]
        for (entries, name), tensor in zip(self._assigned, tensors, strict=True):
            entries[name] = tensor
        for entries, name, value in self._constants:
            entries[name] = value


def refused_write(given: set[int], flat: Sequence[Any], written: dict[int, bool]) -> str:
    """Say what makes writing into arguments impossible; empty if nothing does.

    A graph was captured with tensors that share no memory, and writes into what it takes, which
    is a copy where a tensor is not dense. `given` are the ids of the call's own tensors, `written`
    tells by position whether autograd watches.
    """
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    for position, is_watched in written.items():
        tensor = flat[position]
        if is_watched and tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            return "forward writes into a leaf Variable that requires grad"
        if id(tensor) not in given:
            return "forward writes into an argument that is not dense"
        storage = tensor.untyped_storage().data_ptr()
        if storage and storages.count(storage) > 1:
            return "forward writes into an argument that shares its memory with another tensor"
    return ""


def _condition(symbols: Sequence[str], words: str) -> Callable[..., bool]:
    """Compile a condition on integers, which stand under the names of their symbols."""
    holds = eval(f"lambda {', '.join(symbols)}: {words}", {"math": math, "torch": torch})

    def holds_or_raises(*integers: int) -> bool:
        try:
            return holds(*integers)
        # A condition on 1 / n is undefined for n = 0.
        except (ArithmeticError, ValueError):
            return False

    return holds_or_raises
