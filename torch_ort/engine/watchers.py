"""Notifies reports, profiles and checks of the graphs that are compiled and called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch_ort import _C
from torch_ort.core.scopes import listening
from torch_ort.engine.program import Program

_watchers: list[list[Program]] = []
# Called before each run of a graph, with its session, tensors and symbol values.
CallWatcher = Callable[[_C.Session, Sequence[Any], Sequence[Any]], None]
call_watchers: list[CallWatcher] = []


def note(programs: list[Program]) -> None:
    """Add graphs that were compiled to the lists of all watchers."""
    for watcher in _watchers:
        watcher.extend(programs)


def watching() -> AbstractContextManager[list[Program]]:
    """Give a list that the graphs compiled meanwhile are added to."""
    return listening(_watchers)


def note_call(session: _C.Session, tensors: Sequence[Any], symbols: Sequence[Any]) -> None:
    """Call all watchers of calls: a graph is about to run."""
    for watcher in list(call_watchers):
        watcher(session, tensors, symbols)


@contextmanager
def watching_calls(watcher: CallWatcher) -> Iterator[None]:
    """Have a function called before each run of a graph, with its inputs."""
    call_watchers.append(watcher)
    try:
        yield
    finally:
        call_watchers.remove(watcher)
