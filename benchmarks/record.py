"""What one backend did with one model, and the figures taken from it."""

from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

import targets
from targets import Verdict

# The kinds of figures.
STEADY, FIRST, PEAK = "steady step", "first step", "peak memory"

Counters = dict[str, dict[str, int]]


@dataclass
class Record:
    """The raw measurements of one model, backend and number of threads.

    Times are in seconds. `steps` and `fwd_bwd` hold one list a round; what is None or empty was
    not measured.
    """

    model: str
    backend: str
    threads: int
    is_other_build: bool = False  # the engine of the checkout that --against names
    steps: list[list[float]] = field(default_factory=list)
    fwd_bwd: list[list[float]] = field(default_factory=list)
    foreign_cpu: list[float] = field(default_factory=list)
    first_cold: list[dict[str, Any]] = field(default_factory=list)
    first_warm: dict[str, Any] | None = None
    # Loss of the first step, which equal seeds make comparable between backends.
    loss: float | None = None
    # Whether that step drew random numbers.
    is_random: bool | None = None
    memory: list[dict[str, Any]] = field(default_factory=list)
    # What each steadily stepping worker counted in all, and what all did in timed steps alone.
    steady_counters: list[Counters] = field(default_factory=list)
    # What the machine can do, and what forward and backward take at least on it.
    roofline: dict[str, Any] | None = None
    roofline_error: str | None = None
    package: str | None = None  # the folder that these processes took torch_ort from
    counted_in_runs: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    # What strict mode raised: the figures are those of the engine and eager PyTorch together.
    refused: str | None = None

    @property
    def label(self) -> str:
        """Name the backend, and whose build it is where that is not this checkout's."""
        return f"{self.backend} of the other build" if self.is_other_build else self.backend

    @property
    def counters(self) -> Counters:
        """Return what the first steadily stepping worker counted."""
        return self.steady_counters[0] if self.steady_counters else {}

    def counters_of(self, kind: str) -> list[Counters]:
        """Return the counters of every process behind one kind of figure."""
        if kind == STEADY:
            return self.steady_counters
        answers = self.first_cold if kind == FIRST else self.memory
        return [answer["counters"] for answer in answers]

    def fallbacks(self, kind: str) -> int | None:
        """How often torch_ort left a graph to eager; None if a process did not say."""
        counts = [counters.get("ort", {}).get("fallbacks") for counters in self.counters_of(kind)]
        return None if None in counts else sum(counts)

    def kernel_calls(self) -> float | None:
        """Return the engine's kernel calls a step, None if it did not count them."""
        if "steps_run" not in self.counted_in_runs:
            return None
        return self.counted_in_runs["steps_run"] / len(flatten(self.steps))

    def figures(self) -> dict[str, Any]:
        """Return every figure by name: times in seconds, sizes in bytes, None if not measured."""
        cold = [first["first_step_s"] for first in self.first_cold]
        return {
            "min_step": smallest(flatten(self.steps)),
            "median_step": middle(flatten(self.steps)),
            "min_fwd_bwd": smallest(flatten(self.fwd_bwd)),
            "median_fwd_bwd": middle(flatten(self.fwd_bwd)),
            "min_first_cold": smallest(cold),
            "median_first_cold": middle(cold),
            "first_warm": self.first_warm["first_step_s"] if self.first_warm else None,
            "step_peak": self._smallest_size("step_peak_bytes"),
            "activations": self._smallest_size("activation_bytes"),
            "first_peak": self._smallest_size("first_peak_bytes"),
            "reserved": self._smallest_size("reserved_peak_bytes"),
        }

    def _smallest_size(self, key: str) -> int | None:
        return smallest([sizes[key] for sizes in self.memory if sizes.get(key) is not None])


class Records:
    """All records of a run, found by what was measured."""

    def __init__(self) -> None:
        self.all: list[Record] = []

    def add(self, model: str, backend: str, threads: int, is_other_build: bool = False) -> Record:
        """Start an empty record."""
        record = Record(model, backend, threads, is_other_build)
        self.all.append(record)
        return record

    def peer(self, record: Record, backend: str) -> Record | None:
        """Return another backend's record of the same model and threads, of this build."""
        key = (record.model, backend, record.threads, False)
        return next((r for r in self.all if key_of(r) == key), None)

    def other_build(self, record: Record) -> Record | None:
        """Return the record of the same measurement with the other build, if there is one."""
        key = (record.model, record.backend, record.threads, True)
        return next((r for r in self.all if key_of(r) == key), None)

    def ratio(self, record: Record, backend: str, figure: str) -> float | None:
        """Return a figure over a peer's; None where either was not measured."""
        peer = self.peer(record, backend)
        ours, theirs = record.figures()[figure], peer.figures()[figure] if peer else None
        return ours / theirs if ours is not None and theirs else None

    def of_least(self, record: Record) -> float | None:
        """Return forward and backward, at their fastest, over the least possible time."""
        ours, spent = self.peer(record, "ort"), record.figures()["min_fwd_bwd"]
        if ours is None or ours.roofline is None or spent is None:
            return None
        return spent / ours.roofline["least_s"]

    def mean_ratio(self, threads: int, backend: str, figure: str) -> float | None:
        """Return the geometric mean over all models of ort's figure over another backend's."""
        key = ("ort", threads, False)
        ours = [r for r in self.all if key_of(r)[1:] == key]
        ratios = [ratio for r in ours if (ratio := self.ratio(r, backend, figure)) is not None]
        return geometric_mean(ratios) if ratios else None

    def verdicts(self, record: Record) -> list[Verdict]:
        """Judge a record by the targets that can be judged from what was measured."""
        if record.is_other_build:
            return []
        if record.backend == "ortmodule":
            limit = targets.ORTMODULE_VS_ORT
            asked = [
                (STEADY, "minimum / ort", "min_step", "ort", limit),
                (STEADY, "median / ort", "median_step", "ort", limit),
                (FIRST, "/ ort", "min_first_cold", "ort", targets.ORTMODULE_FIRST_VS_ORT),
            ]
            return self._verdicts(record, asked)
        if record.backend != "ort":
            return []
        steady = targets.steady_limit(record.model)
        asked = [
            # Both have to hold: a lucky minimum is not a steady step.
            (STEADY, "minimum / eager", "min_step", "eager", steady),
            (STEADY, "median / eager", "median_step", "eager", steady),
            (STEADY, "minimum / inductor", "min_step", "inductor", targets.STEADY_VS_INDUCTOR),
            (STEADY, "median / inductor", "median_step", "inductor", targets.STEADY_VS_INDUCTOR),
            (FIRST, "/ aot_eager", "min_first_cold", "aot_eager", targets.FIRST_STEP_VS_AOT_EAGER),
            (FIRST, "/ inductor", "min_first_cold", "inductor", targets.FIRST_STEP_VS_INDUCTOR),
            (PEAK, "/ eager", "step_peak", "eager", targets.PEAK_VS_EAGER),
        ]
        return self._verdicts(record, asked)

    def _verdicts(self, record: Record, asked: list[tuple]) -> list[Verdict]:
        verdicts = []
        for kind, name, figure, backend, limit in asked:
            ratio = self.ratio(record, backend, figure)
            if ratio is not None:
                verdicts.append(Verdict(kind, name, ratio, limit, record.fallbacks(kind)))
        for counter in ("arena_growth", "arena_allocations"):
            if counter in record.counted_in_runs:
                name = counter.replace("_", " ")
                value = record.counted_in_runs[counter]
                verdicts.append(Verdict(STEADY, name, value, 0, record.fallbacks(STEADY)))
        return verdicts


def key_of(record: Record) -> tuple[str, str, int, bool]:
    return record.model, record.backend, record.threads, record.is_other_build


def flatten(rounds: list[list[float]]) -> list[float]:
    return [value for one in rounds for value in one]


def smallest(values: list[Any]) -> Any | None:
    return min(values, default=None)


def middle(values: list[float]) -> float | None:
    return median(values) if values else None
