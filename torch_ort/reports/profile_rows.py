"""What a profile is made of: times of steps, collectives, bars of a timeline, graphs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ort.reports.products import Product

KINDS = ("products", "attention", "regions", "collectives", "views", "other")


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
    dtype: str  # of its first result
    products: list[Product] = field(default_factory=list)  # of a run
    calls: int = 0  # in a run
    peak: float = 0.0  # operations a second that its products can come to; 0: unknown
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
    def flops(self) -> int:
        """Operations of a run's products; 0 where it has none."""
        return sum(product.flops for product in self.products)

    @property
    def sizes(self) -> str:
        """What its products multiply, `128×64×256` and the like."""
        return ", ".join(dict.fromkeys(product.sizes for product in self.products))

    @property
    def per_run(self) -> float:
        """Microseconds of all its calls in a run, of the run that stands in the middle."""
        each = max(self.calls, 1)
        starts = range(0, len(self.microseconds), each)
        return statistics.median([sum(self.microseconds[i : i + each]) for i in starts] or [0.0])

    @property
    def lost(self) -> float:
        """Microseconds of a run above those that its products take at the peak."""
        return self.per_run - self.flops / self.peak * 1e6

    @property
    def of_peak(self) -> float | None:
        """Part of the peak that its products run at; None where either is unknown."""
        if not (self.flops and self.peak and self.per_run):
            return None
        return self.flops / self.per_run * 1e6 / self.peak

    @property
    def rate(self) -> tuple[float, str]:
        """Billions a second, and of what: GFLOP/s of a run's products, else GB/s of the median."""
        if self.flops:
            amount, spent, unit = self.flops, self.per_run, "GFLOP/s"
        else:
            amount, spent, unit = self.read_bytes + self.written_bytes, self.median, "GB/s"
        return amount / spent / 1e3 if spent else 0.0, unit


@dataclass
class Bar:
    """One event of a measured step, in microseconds from its start."""

    name: str
    start: float
    length: float
    step: StepTimes | None = None  # None: a run of half a graph, or something outside the engine


@dataclass
class Flight:
    """One measured run of a collective, in microseconds: from its start to the end of its waits."""

    run: int
    begin: float  # from the beginning of the measured step
    length: float
    waited: float  # in which the graph only waited for it
    beside_products: float  # in which products or attention ran


@dataclass
class Collective:
    """A communication between ranks: the step that starts it, and those that wait for it."""

    start: StepTimes
    waits: list[StepTimes]
    group: str
    flights: list[Flight] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the larger of operands and results."""
        return max(self.start.read_bytes, self.start.written_bytes)

    @property
    def length(self) -> float:
        """Microseconds in flight, of the run that stands in the middle."""
        return self._median([flight.length for flight in self.flights])

    @property
    def waited(self) -> float:
        """Microseconds that the graph has waited for it."""
        return self._median([flight.waited for flight in self.flights])

    @property
    def beside_products(self) -> float:
        """Microseconds in flight while products or attention ran."""
        return self._median([flight.beside_products for flight in self.flights])

    @property
    def hidden(self) -> float:
        """Part of the time in flight, over all runs, in which the graph did other work."""
        return hidden_part(self.flights)

    @staticmethod
    def _median(numbers: list[float]) -> float:
        return statistics.median(numbers or [0.0])


def hidden_part(flights: Sequence[Flight]) -> float:
    """Give the part of the time in flight in which a graph did other work than wait."""
    whole = sum(flight.length for flight in flights)
    return 1 - sum(flight.waited for flight in flights) / whole if whole else 0.0


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
