"""What `torch_ort.profile` gives: tables, a Chrome trace, a page."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from torch_ort._C import UserError
from torch_ort.dynamo.uncaptured import Break, lines_of
from torch_ort.reports import profile_page
from torch_ort.reports.peaks import DTYPES, Peaks
from torch_ort.reports.profile_rows import (
    KINDS,
    Bar,
    Collective,
    GraphProfile,
    StepTimes,
    hidden_part,
)
from torch_ort.reports.tables import Cell, Table, bytes_text, columns, time_text

ROWS_IN_TEXT = 40
FREE = "they were made once, with the plan"


@dataclass
class Profile:
    """Everything that `profile` measured; prints as a table."""

    graphs: list[GraphProfile]
    steps: list[StepTimes]
    wall: list[float]  # microseconds of each measured step
    outside: dict[str, float]  # microseconds outside the engine's steps, all measured steps
    bars: list[Bar]  # of the median step
    bars_of: int  # which step that is
    fallbacks: list[str]  # why parts of the model ran in eager PyTorch
    events: torch.profiler.profile
    breaks: list[Break] = field(default_factory=list)  # what Dynamo left to eager PyTorch, and why
    peaks: Peaks | None = None  # none were measured: nothing has products, or not on the CPU
    collectives: list[Collective] = field(default_factory=list)  # none: not on the CPU

    @property
    def product_dtypes(self) -> list[str]:
        """Dtypes that the machine has a peak of and that products of the steps compute."""
        return [each for each in DTYPES if any(s.flops and s.dtype == each for s in self.steps)]

    def hold_against(self, peaks: Peaks) -> None:
        """Judge the steps with products by what these can come to at most."""
        self.peaks = peaks
        for step in self.steps:
            step.peak = peaks.flops.get(step.dtype, 0.0)

    @property
    def of_peak(self) -> float | None:
        """Part of their peaks that all products together run at; None where nothing is known."""
        judged = [step for step in self.steps if step.of_peak is not None]
        if not judged:
            return None
        least = sum(step.flops / step.peak * 1e6 for step in judged)
        return least / sum(step.per_run for step in judged)

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

    @property
    def ranked(self) -> list[StepTimes]:
        """The steps that ran, the costliest first."""
        return sorted((step for step in self.steps if step.microseconds), key=lambda s: -s.total)

    @property
    def free(self) -> list[StepTimes]:
        """The views that cost nothing: they were made once, with the plan."""
        return [s for s in self.steps if not s.microseconds and self._is_free(s)]

    @property
    def idle(self) -> list[StepTimes]:
        """The steps that no measured step of the user's has asked for."""
        return [s for s in self.steps if not s.microseconds and not self._is_free(s)]

    def _is_free(self, step: StepTimes) -> bool:
        return step.kind == "views" and bool(self.graphs[step.graph].plan)

    def __str__(self) -> str:
        shown, rest = self.ranked[:ROWS_IN_TEXT], self.ranked[ROWS_IN_TEXT:]
        lines = [self.summary(), *filter(None, [self.peak_text(), self.collective_text()])]
        lines += [f"fell back: {reason}" for reason in self.fallbacks]
        if self.breaks:
            lines += lines_of(self.breaks)
        lines.append("")
        if shown:
            lines += columns(self.step_table(shown))
        if rest:
            spent = sum(step.total for step in rest)
            each, share = time_text(self.per_step(spent)), self.share(spent)
            lines.append(f"and {len(rest)} more steps: {each} per step, {share:.1%}")
        if self.free:
            lines.append(f"and {len(self.free)} views that cost nothing: {FREE}")
        if self.idle:
            lines.append(f"and {len(self.idle)} steps that did not run")
        if self.collectives:
            heads, rows = self.collective_table()
            lines += ["", *columns((heads, rows[:ROWS_IN_TEXT]))]
            if len(rows) > ROWS_IN_TEXT:
                lines.append(f"and {len(rows) - ROWS_IN_TEXT} more collectives")
        for head, sums in (("kind", self.kinds), ("outside the steps", self.outside)):
            lines += ["", *columns(self.sum_table(head, sums))]
        return "\n".join(lines)

    def summary(self) -> str:
        """Say it in one line."""
        return (
            f"torch_ort: {len(self.graphs)} graph(s), {len(self.wall)} measured step(s), "
            f"median {time_text(statistics.median(self.wall))}, min {time_text(min(self.wall))}, "
            f"{self.inside:.1%} in the engine's steps"
        )

    @property
    def inside(self) -> float:
        """Part of the measured time that the engine's steps take."""
        return self.share(sum(self.kinds.values()))

    def peak_text(self) -> str:
        """Say how far products are from the machine's peak; nothing where that is not known."""
        if self.peaks is None or self.of_peak is None:
            return ""
        return f"products at {self.of_peak:.1%} of the peak: {self.peaks}"

    def collective_text(self) -> str:
        """Say how long ranks communicate in a step, and how much of it is hidden, if they do."""
        flights = [flight for each in self.collectives for flight in each.flights]
        if not flights:
            return ""
        spent = time_text(self.per_step(sum(flight.length for flight in flights)))
        return (
            f"{len(self.collectives)} collective(s), {spent} in flight per step, of which "
            f"{hidden_part(flights):.1%} are hidden behind other work"
        )

    def collective_table(self) -> Table:
        """Give a row for each collective, the longest in flight first."""
        rows = [
            (
                each.start.name, (each.start.graph, str(each.start.graph)),
                each.start.half, each.start.op, each.group,
                (each.num_bytes, bytes_text(each.num_bytes)),
                (each.length, time_text(each.length)), (each.waited, time_text(each.waited)),
                (each.hidden, f"{each.hidden:.1%}"),
                (each.beside_products, time_text(each.beside_products)), each.start.origin,
            )
            for each in sorted(self.collectives, key=lambda each: -each.length)
        ]  # fmt: skip
        heads = (
            "collective", "graph", "half", "op", "group", "bytes", "in flight", "waited",
            "hidden", "beside products", "origin",
        )  # fmt: skip
        return heads, rows

    def step_table(self, steps: Sequence[StepTimes]) -> Table:
        """Give a row for each step."""
        heads = (
            "graph", "half", "step", "kind", "where", "op", "count", "min", "median",
            "share", "read", "written", "rate", "of peak", "product", "origin",
        )  # fmt: skip
        return heads, [self._step_row(step) for step in steps]

    def _step_row(self, step: StepTimes) -> tuple[Cell, ...]:
        count, share, (rate, unit) = len(step.microseconds), self.share(step.total), step.rate
        return (
            (step.graph, str(step.graph)), step.half, step.name, step.kind, step.where, step.op,
            (count, str(count)), (step.min, time_text(step.min)),
            (step.median, time_text(step.median)),
            (share, f"{share:.1%}"), (step.read_bytes, bytes_text(step.read_bytes)),
            (step.written_bytes, bytes_text(step.written_bytes)),
            (rate, f"{rate:.1f} {unit}" if rate else ""),
            (step.of_peak or 0.0, "" if step.of_peak is None else f"{step.of_peak:.1%}"),
            step.sizes, step.origin,
        )  # fmt: skip

    def sum_table(self, head: str, sums: dict[str, float]) -> Table:
        """Give a row for each sum of microseconds, the largest first."""
        rows = []
        for name, total in sorted(sums.items(), key=lambda item: -item[1]):
            each, share = self.per_step(total), self.share(total)
            rows.append((name, (each, time_text(each)), (share, f"{share:.1%}")))
        return (head, "per step", "share"), rows

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write torch.profiler's Chrome trace, with what is in flight between ranks.

        Raises UserError where it cannot be written.
        """
        _write(path, self._trace)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs nothing else. Raises UserError where it cannot be written."""
        _write(path, profile_page.render(self).encode("utf-8", "backslashreplace"))

    @cached_property
    def _trace(self) -> bytes:
        # The profiler writes its trace only once, and is silent if it cannot.
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self.events.export_chrome_trace(path)
            with open(path, "rb") as file:
                trace = file.read()
        return _with_flights(trace, self.collectives) if self.collectives else trace


def _with_flights(trace: bytes, collectives: Sequence[Collective]) -> bytes:
    """Add the flights of collectives, which begin in one step and end in another, to a trace."""
    content = json.loads(trace)
    steps = sorted(
        (
            event
            for event in content["traceEvents"]
            if event.get("ph") == "X" and event["name"].startswith("ProfilerStep")
        ),
        key=lambda event: event["ts"],
    )
    number = 0
    for collective in collectives:
        for flight in collective.flights:
            number += 1
            step = steps[flight.run]
            common = {
                "name": collective.start.name, "cat": "collective", "id": number,
                "pid": step["pid"], "tid": step["tid"],
            }  # fmt: skip
            told = {
                "operator": collective.start.op, "group": collective.group,
                "bytes": collective.num_bytes, "waited, us": flight.waited,
            }  # fmt: skip
            begin = step["ts"] + flight.begin
            content["traceEvents"] += [
                {**common, "ph": "b", "ts": begin, "args": told},
                {**common, "ph": "e", "ts": begin + flight.length},
            ]
    return json.dumps(content).encode()


def _write(path: str | os.PathLike[str], content: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        name = os.fspath(path)
        raise UserError(f"profile: cannot write {name!r}: {error.strerror}") from None
