"""What a profile is made of: times of steps, bars of a timeline, graphs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

KINDS = ("products", "attention", "regions", "views", "other")


@dataclass
class StepTimes:
    """One step of the engine, over all measured runs."""

    graph: int
    name: str
    op: str
    kind: str  # one of KINDS
    where: str  # whose code runs it: region, native (another kernel of ours), ATen or Python
    backward: bool
    origin: str  # the user's line
    read_bytes: int
    written_bytes: int
    flops: int = 0  # of one call; 0: unknown
    microseconds: list[float] = field(default_factory=list)  # none: done once, with the plan

    def join(self, other: StepTimes) -> None:
        """Take in another call of the same node."""
        if other.op not in self.op.split(", "):
            self.op += f", {other.op}"
        if self.kind == "views":
            self.kind, self.where = other.kind, other.where

    @property
    def half(self) -> str:
        """`forward` or `backward`."""
        return "backward" if self.backward else "forward"

    @property
    def total(self) -> float:
        """Microseconds of all measured runs together."""
        return sum(self.microseconds)

    @property
    def median(self) -> float:
        """Microseconds of the call that stands in the middle."""
        return statistics.median(self.microseconds or [0.0])

    @property
    def min(self) -> float:
        """Microseconds of the fastest call."""
        return min(self.microseconds, default=0.0)

    @property
    def rate(self) -> tuple[float, str]:
        """Billions a second in the median, and of what: GFLOP/s where known, else GB/s."""
        amount, unit = self.flops, "GFLOP/s"
        if not amount:
            amount, unit = self.read_bytes + self.written_bytes, "GB/s"
        return amount / self.median / 1e3 if self.median else 0.0, unit


@dataclass
class Bar:
    """One event of a measured step, in microseconds from its start."""

    name: str
    start: float
    length: float
    step: StepTimes | None = None  # None: a run of half a graph, or something outside the engine


@dataclass
class RegionProfile:
    """A fused region: the nodes of its body and the tile program that runs them."""

    name: str
    num_nodes: int
    body: str  # a node a line
    program: str


@dataclass
class GraphProfile:
    """What is known of one graph besides its times."""

    is_training: bool
    plan: dict[str, Any]  # none if the graph never ran
    memory: list[dict[str, Any]]  # rows of `Session.plan_table`: tensors in planned areas
    in_use: dict[str, int]  # bytes of planned areas that hold live tensors while a step runs
    regions: list[RegionProfile]
