"""Rows of the coverage table: one architecture on one road, and what it lost since it was kept."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Of the losses of float32, unless the last bits of the weights make a larger difference.
LOSS_TOLERANCE = 1e-4
EAGER = "eager"


@dataclass
class Row:
    """What a worker found; `measured` is empty, and `error` says why, where it has failed."""

    architecture: str
    kind: str
    road: str
    measured: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        """Tell whether forward and backward of a step are one graph, and nothing besides."""
        found = self.measured
        left = ("breaks", "refused", "fallbacks")
        return bool(found) and found["graphs"] == 1 and not any(found[name] for name in left)

    def is_accurate(self, tolerance: float) -> bool:
        """Tell whether the losses of the first steps are eager's."""
        return bool(self.measured) and self.measured["loss_difference"] <= tolerance

    def share_of_engine(self, what: str) -> float | None:
        """Return the engine's part of `calls` or of `us`; eager PyTorch has the rest."""
        counted = self.measured.get("profile")
        if not counted:
            return None
        total = counted[f"engine_{what}"] + counted[f"eager_{what}"]
        return counted[f"engine_{what}"] / total if total else None

    @property
    def share_of_own_kernels(self) -> float | None:
        """Return the part of the engine's time in which it does not run PyTorch's kernels."""
        counted = self.measured.get("profile")
        if not counted or not counted["engine_us"]:
            return None
        return 1 - counted["by_torch_us"] / counted["engine_us"]


@dataclass
class Coverage:
    """All rows of a run, with eager's beside them, and what it ran on."""

    settings: dict[str, Any]
    rows: list[Row]

    def row(self, architecture: str, road: str) -> Row | None:
        """Find a row."""
        return next(
            (r for r in self.rows if (r.architecture, r.road) == (architecture, road)), None
        )

    def tolerance(self, architecture: str) -> float:
        """Return how far the losses of an architecture may be from eager's, relative to them."""
        eager = self.row(architecture, EAGER)
        rounding = eager.measured["rounding_difference"] if eager and eager.measured else 0.0
        return max(LOSS_TOLERANCE, rounding)

    def of_roads(self, *roads: str) -> list[Row]:
        """Return the rows of some roads."""
        return [row for row in self.rows if row.road in roads]

    def save(self, path: Path) -> None:
        """Write a JSON file."""
        rows = [asdict(row) for row in self.rows]
        path.write_text(json.dumps({"settings": self.settings, "rows": rows}, indent=1) + "\n")


def load(path: Path) -> Coverage:
    """Read what `Coverage.save` wrote."""
    read = json.loads(path.read_text())
    return Coverage(read["settings"], [Row(**row) for row in read["rows"]])


def lost(before: Row, now: Row, tolerance: float) -> list[str]:
    """Say what a row had and has no more; what it never had is not lost."""
    name = f"{now.architecture}, {now.road}"
    if now.error is not None:
        return [] if before.error is not None else [f"{name}: failed: {now.error}"]
    words = []
    if before.is_whole and not now.is_whole:
        found = {key: now.measured[key] for key in ("graphs", "breaks", "refused", "fallbacks")}
        words.append(f"{name}: was captured whole: got {found}: {now.measured['reasons']}")
    if before.is_accurate(tolerance) and not now.is_accurate(tolerance):
        off = now.measured["loss_difference"]
        words.append(f"{name}: loss: differs by {off:.1e} of eager's, want ≤ {tolerance:.1e}")
    return words
