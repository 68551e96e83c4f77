"""Context managers for values and listeners that are in force inside of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_ABSENT = object()


@contextmanager
def set_here(local: threading.local, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of a thread's values be `value` in here; afterwards it is as it was."""
    values = vars(local)
    before = values.get(name, _ABSENT)
    values[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del values[name]
        else:
            values[name] = before


@contextmanager
def listening(listeners: list[list[T]]) -> Iterator[list[T]]:
    """Give a new list, which is one of `listeners` in here."""
    heard: list[T] = []
    listeners.append(heard)
    try:
        yield heard
    finally:
        # By identity, since two empty lists are equal.
        listeners[:] = [each for each in listeners if each is not heard]
