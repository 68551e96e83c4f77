"""Numbers in attributes of modules and of other objects that differ from call to call.

A temperature that the loop anneals, or a counter that forward increments, is no constant of a
graph: calls bring it like an argument, under the words that name its place, and get back what
forward assigns to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_ort._C import Unsupported
from torch_ort.guards.number_places import NumberPlace, is_number
from torch_ort.rules.numbers import node_of_number

_MISSING = object()


class OpenNumbers:
    """The places of numbers that calls of one graph bring."""

    def __init__(self, places: Iterable[NumberPlace] = ()) -> None:
        self._places = [*places]
        self._keys = {place.key for place in self._places}
        # What forward has assigned in the recorded run: an expression, or a constant.
        self._assigned: list[tuple[NumberPlace, Any]] = []

    @property
    def names(self) -> frozenset[str]:
        """Under which names calls bring the numbers."""
        return frozenset(place.words for place in self._places)

    def is_open(self, entries: Any, name: Any) -> bool:
        """Tell whether a number there may differ between calls."""
        return (id(entries), name) in self._keys

    def brought_by(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give the keyword arguments of a call with the numbers that stand there now."""
        if not self._places:
            return kwargs
        numbers = {place.words: place.entries.get(place.name) for place in self._places}
        return kwargs | numbers

    def call(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call `run` with the numbers of a call, which are among `kwargs`, in their places.

        Afterwards these hold what they held.
        """
        return self._call(run, args, kwargs)[0]

    def record(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call `run` as `call` does, and note what it assigns.

        Raises Unsupported if that is no expression over numbers.
        """
        result, self._assigned = self._call(run, args, kwargs)
        for place, value in self._assigned:
            if node_of_number(value) is None and not is_number(value):
                kind = "nothing" if value is _MISSING else f"a {type(value).__name__}"
                raise Unsupported(
                    f"forward assigns {kind} to {place.words}, which held a number before"
                )
        return result

    def _call(
        self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, list[tuple[NumberPlace, Any]]]:
        if not self._places:
            return run(*args, **kwargs), []
        rest = dict(kwargs)
        given = [rest.pop(place.words) for place in self._places]
        before = [place.entries.get(place.name, _MISSING) for place in self._places]
        for place, value in zip(self._places, given, strict=True):
            place.entries[place.name] = value
        assigned = []
        try:
            result = run(*args, **rest)
        finally:
            assigned += self._put_back(given, before)
        return result, assigned

    def _put_back(self, given: list[Any], before: list[Any]) -> list[tuple[NumberPlace, Any]]:
        assigned = []
        for place, own, value in zip(self._places, given, before, strict=True):
            now = place.entries.get(place.name, _MISSING)
            if now is not own:
                assigned.append((place, now))
            if value is _MISSING:
                place.entries.pop(place.name, None)
            else:
                place.entries[place.name] = value
        return assigned

    @property
    def has_assigned(self) -> bool:
        """Tell whether the recorded run has assigned numbers."""
        return bool(self._assigned)

    def assign(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Assign what forward assigns in a call that brings these numbers and sizes."""
        for place, assigned in self._assigned:
            node = node_of_number(assigned)
            place.entries[place.name] = assigned if node is None else node.of(values, sizes)
