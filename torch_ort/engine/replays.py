"""Tells which parts of a graph run as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ort import _C


@dataclass(frozen=True)
class Part:
    """The steps [begin, end) of a half ("forward" or "backward") of a graph.

    It has run `replays` times as a CUDA graph, which was captured `captures` times, and `runs`
    times step by step. `refused` says why it is not captured, and is empty if it is.
    """

    half: str
    begin: int
    end: int
    captures: int
    replays: int
    runs: int
    refused: str

    def __str__(self) -> str:
        why = f" ({self.refused})" if self.refused else ""
        return (
            f"{self.half}, steps {self.begin} to {self.end}: {self.captures} captured, "
            f"{self.replays} replayed, {self.runs} run step by step{why}"
        )


@dataclass(frozen=True)
class Replays:
    """What of a graph runs as CUDA graphs, with the plan that was used last.

    `refused` says why nothing does, and is empty if parts do.
    """

    refused: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"none: {self.refused}" if self.refused else "; ".join(map(str, self.parts))


def replays_of(session: _C.Session) -> Replays | None:
    """Give what runs as CUDA graphs; None if none are asked for, or before the first run."""
    found = _C.replay_report(session)
    if found is None:
        return None
    return Replays(found["refused"], tuple(Part(**part) for part in found["parts"]))
