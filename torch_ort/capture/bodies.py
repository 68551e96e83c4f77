"""Bodies of If and Loop in a recorded graph: graphs that name nodes of the graphs around them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from torch_ort.capture.recorder import ControlFlowRecorder

_thread = threading.local()  # `recording`: what records in this thread, where it may branch


@dataclass
class Body:
    """A graph with inputs of its own; its nodes have names that no other graph's have."""

    prefix: str
    graph: fx.Graph = field(default_factory=fx.Graph)


def run_if(inputs: Sequence[Any], bodies: dict[str, Body]) -> None:
    """Stand for an If in a recorded graph: a condition, `then_branch` and `else_branch`."""
    raise NotImplementedError("a recorded If: nothing but the engine runs it")


def run_loop(inputs: Sequence[Any], bodies: dict[str, Body]) -> None:
    """Stand for a Loop: rounds or None, a condition or None, what is carried; `body`.

    The body takes the number of the round and the condition before what is carried; it gives the
    condition of the next round first.
    """
    raise NotImplementedError("a recorded Loop: nothing but the engine runs it")


OPS = {run_if: "If", run_loop: "Loop"}


@contextmanager
def recording_branches(recording: ControlFlowRecorder | None) -> Iterator[None]:
    """Let `recording()` give this in here: None where what is recorded trains."""
    before = getattr(_thread, "recording", None)
    _thread.recording = recording
    try:
        yield
    finally:
        _thread.recording = before


def recording() -> ControlFlowRecorder | None:
    """Give what records branches and loops on data in this thread; None where nothing can."""
    return getattr(_thread, "recording", None)
