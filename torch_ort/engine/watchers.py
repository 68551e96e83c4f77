"""Who is told which graphs were compiled: reports, profiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_ort.engine.program import Program

_watchers: list[list[Program]] = []


def note(programs: list[Program]) -> None:
    """Tell whoever is watching that graphs were compiled."""
    for watcher in _watchers:
        watcher.extend(programs)


@contextmanager
def watching() -> Iterator[list[Program]]:
    """Give a list that the graphs compiled meanwhile are added to."""
    watched: list[Program] = []
    _watchers.append(watched)
    try:
        yield watched
    finally:
        # By identity: two empty lists are equal.
        _watchers[:] = [watcher for watcher in _watchers if watcher is not watched]
