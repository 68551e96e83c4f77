"""What `--against` asks: whether this build is slower or larger than the other one.

The speed of a shared machine changes by a third from one second to the next, and a process may be
slow for all its life. So times are compared in pairs: each turn, and each first step, with the one
of the other build that was taken right before or after it. On CUDA the two are of processes that
ran one after the other.
"""

from dataclasses import dataclass
from statistics import geometric_mean, median, quantiles

import targets
from record import Record, Records


@dataclass(frozen=True)
class Pair:
    """The same measurement with this build and with the other one."""

    this: Record
    other: Record

    def ratio(self, figure: str) -> float | None:
        """Return this build's figure over the other's; None where either was not measured."""
        if figure == "peak":
            ours, theirs = (record.figures()["step_peak"] for record in (self.this, self.other))
            return ours / theirs if ours is not None and theirs else None
        ratios = self.pairs(figure)
        return median(ratios) if ratios else None

    def quartiles(self, figure: str) -> tuple[float, float] | None:
        """Return the first and third quartile of what a time's ratio is the median of."""
        ratios = [] if figure == "peak" else self.pairs(figure)
        if len(ratios) < 2:
            return None
        low, _, high = quantiles(ratios, method="inclusive")
        return low, high

    def pairs(self, figure: str) -> list[float]:
        """Return this build's times over the other's that were taken beside them."""
        ours, theirs = (_times(record, figure) for record in (self.this, self.other))
        return [our / their for our, their in zip(ours, theirs, strict=False)]

    def kernel_calls(self) -> tuple[float | None, float | None]:
        """Return the kernel calls a step of both builds."""
        return self.this.kernel_calls(), self.other.kernel_calls()

    def arena_bytes(self) -> tuple[int | None, int | None]:
        """Return what the arenas of both builds held after the timed steps."""
        return _arena_bytes(self.this), _arena_bytes(self.other)

    def differences(self) -> list[str]:
        """Say in words what is not as the other build has it, beyond the limits of targets.py."""
        words = []
        for figure, limit in targets.AGAINST_OTHER_BUILD.items():
            ratio = self.ratio(figure)
            if ratio is not None and ratio > limit:
                words.append(f"{figure} {ratio:.3f} of the other's, want ≤ {limit:g}")
        for name, (ours, theirs) in (
            ("kernel calls a step", self.kernel_calls()),
            ("arena bytes", self.arena_bytes()),
        ):
            if ours != theirs:
                words.append(f"{name} {ours}, the other's {theirs}")
        fallbacks = self.this.fallbacks("steady step")
        if fallbacks != 0:
            words.append(f"fallbacks {fallbacks}")
        return words


def _times(record: Record, figure: str) -> list[float]:
    """Return the median step of each turn, or the first steps."""
    if figure == "step":
        return list(map(median, record.steps))
    return [first["first_step_s"] for first in record.first_cold]


def _arena_bytes(record: Record) -> int | None:
    return record.counters.get("ort", {}).get("arena_bytes")


def pairs_of(records: Records) -> list[Pair]:
    """Return all measurements that both builds finished."""
    pairs = []
    for record in records.all:
        other = None if record.is_other_build else records.other_build(record)
        if other is not None and record.error is None and other.error is None:
            pairs.append(Pair(record, other))
    return pairs


def mean_ratio(pairs: list[Pair], figure: str) -> float | None:
    """Return the geometric mean of this build's figure over the other's."""
    ratios = [ratio for pair in pairs if (ratio := pair.ratio(figure)) is not None]
    return geometric_mean(ratios) if ratios else None
