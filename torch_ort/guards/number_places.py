"""Where modules and other objects hold numbers, and the refusal of forwards that change them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_ort.core.refusals import NoCapture


class NumberPlace(NamedTuple):
    """Where a number stands: the entries of a module or of an object, and its name there."""

    entries: dict[str, Any]
    name: str
    words: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells places apart."""
        return id(self.entries), self.name

    @property
    def can_be_open(self) -> bool:
        """Tell whether a float, or an integer of 64 bits, stands there."""
        now = self.entries.get(self.name)
        return is_number(now) and (type(now) is float or -(2**63) <= now < 2**63)

    def holds_another(self, value: Any) -> bool:
        """Tell whether another number of the same type stands there."""
        now = self.entries.get(self.name)
        return type(now) is type(value) and now != value


class AssignedNumbers(NoCapture):
    """Forward gives other numbers to attributes in each call; `places` says to which."""

    def __init__(self, places: Iterable[NumberPlace]) -> None:
        self.places = [*places]
        names = ", ".join(place.words for place in self.places)
        super().__init__(f"forward assigns {names}, which a captured graph cannot do")


def is_number(value: Any) -> bool:
    """Tell whether a value is a float or an integer; a bool is neither."""
    return type(value) in (int, float)
