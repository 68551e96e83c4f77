"""What `torch_ort.profile` gives: tables, a Chrome trace, a page."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from torch_ort import profile_page
from torch_ort._C import UserError
from torch_ort.report import bytes_text

ROWS_IN_TEXT = 40
KINDS = ("products", "attention", "regions", "views", "other")

Cell = str | tuple[float, str]  # a text, or a number with the text that shows it
Table = tuple[Sequence[str], Sequence[Sequence[Cell]]]  # heads, rows


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


@dataclass
class Profile:
    """Everything that `profile` measured; prints as a table."""

    graphs: list[GraphProfile]
    steps: list[StepTimes]
    wall: list[float]  # microseconds of each measured step
    outside: dict[str, float]  # microseconds outside the engine's steps, all measured steps
    bars: list[Bar]  # of the measured step that stands in the middle
    bars_of: int  # which step that is
    fallbacks: list[str]  # why parts of the model ran in eager PyTorch
    events: torch.profiler.profile

    @property
    def kinds(self) -> dict[str, float]:
        """Microseconds of the engine's steps by kind, all measured steps."""
        totals = dict.fromkeys(KINDS, 0.0)
        for step in self.steps:
            totals[step.kind] += step.total
        return totals

    def share(self, microseconds: float) -> float:
        """Give the part of the measured time that this is."""
        return microseconds / sum(self.wall)

    def per_step(self, microseconds: float) -> float:
        """Give the microseconds that fall on one measured step."""
        return microseconds / len(self.wall)

    def __str__(self) -> str:
        ranked = sorted(self.steps, key=lambda step: -step.total)
        rest = ranked[ROWS_IN_TEXT:]
        lines = [self.summary(), *(f"fell back: {reason}" for reason in self.fallbacks), ""]
        lines += _columns(self.step_table(ranked[:ROWS_IN_TEXT]))
        if rest:
            spent = sum(step.total for step in rest)
            each, share = self.per_step(spent), self.share(spent)
            lines.append(f"and {len(rest)} more steps: {each:.1f} us per step, {share:.1%}")
        for head, sums in (("kind", self.kinds), ("outside the steps", self.outside)):
            lines += ["", *_columns(self.sum_table(head, sums))]
        return "\n".join(lines)

    def summary(self) -> str:
        """Say it in one line."""
        inside = self.share(sum(self.kinds.values()))
        return (
            f"torch_ort: {len(self.graphs)} graph(s), {len(self.wall)} measured step(s), "
            f"median {statistics.median(self.wall):.1f} us, min {min(self.wall):.1f} us, "
            f"{inside:.1%} in the engine's steps"
        )

    def step_table(self, steps: Sequence[StepTimes]) -> Table:
        """Give a row for each step."""
        heads = (
            "graph", "half", "step", "kind", "where", "op", "count", "min us", "median us",
            "share", "read", "written", "rate", "origin",
        )  # fmt: skip
        return heads, [self._step_row(step) for step in steps]

    def _step_row(self, step: StepTimes) -> tuple[Cell, ...]:
        count, share, (rate, unit) = len(step.microseconds), self.share(step.total), step.rate
        return (
            (step.graph, str(step.graph)), step.half, step.name, step.kind, step.where, step.op,
            (count, str(count)), (step.min, f"{step.min:.1f}"), (step.median, f"{step.median:.1f}"),
            (share, f"{share:.1%}"), (step.read_bytes, bytes_text(step.read_bytes)),
            (step.written_bytes, bytes_text(step.written_bytes)),
            (rate, f"{rate:.1f} {unit}" if rate else ""), step.origin,
        )  # fmt: skip

    def sum_table(self, head: str, sums: dict[str, float]) -> Table:
        """Give a row for each sum of microseconds."""
        rows = []
        for name, total in sums.items():
            each, share = self.per_step(total), self.share(total)
            rows.append((name, (each, f"{each:.1f}"), (share, f"{share:.1%}")))
        return (head, "us per step", "share"), rows

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write torch.profiler's Chrome trace. Raises UserError where it cannot be written."""
        _write(path, self._trace)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs nothing else. Raises UserError where it cannot be written."""
        _write(path, profile_page.render(self).encode("utf-8", "backslashreplace"))

    @cached_property
    def _trace(self) -> bytes:
        # The profiler writes its trace once, and does not say so where it cannot.
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self.events.export_chrome_trace(path)
            with open(path, "rb") as file:
                return file.read()


def _columns(table: Table) -> list[str]:
    """Set rows below their heads; cells with a number stand on the right."""
    heads, rows = table
    texts = [[cell[1] if isinstance(cell, tuple) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    numbers = [isinstance(cell, tuple) for cell in rows[0]]
    return [
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in (heads, *texts)
    ]


def _write(path: str | os.PathLike[str], content: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        name = os.fspath(path)
        raise UserError(f"profile: cannot write {name!r}: {error.strerror}") from None
