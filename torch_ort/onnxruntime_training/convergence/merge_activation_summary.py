"""The command that compares the statistics of two runs, tensor by tensor."""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SUMMARY = "summary.txt"
_DIRECTIONS = ("_forward", "_backward")
_COMPARED = ("mean", "std", "min", "max")
_COUNTED = ("shape", "dtype", "nan", "inf")  # a difference in these is reported in words
_ABOUT = ("activation", "direction", "order", "depth")
_SIDES = ("pt", "ort")


class BadFile(Exception):
    """A file that is not what StatisticsSubscriber writes."""


@dataclass
class Record:
    """One file of statistics."""

    fields: dict[str, str]
    values: list[str]

    @property
    def order(self) -> int:
        """Which file of its step it was."""
        return int(self.fields["order"])


@dataclass
class Pair:
    """The records of one activation in both runs; None where a run has none."""

    file: str
    pt: Record | None
    ort: Record | None

    @property
    def record(self) -> Record:
        """The record of the run that has one, PyTorch's first."""
        return self.pt or self.ort

    @property
    def label(self) -> str:
        """Name and direction."""
        return f"{self.record.fields['activation']} {self.record.fields['direction']}"

    def difference(self, key: str) -> float:
        """Give how far a number of both runs lies apart; equal infinities do not."""
        a, b = (float(side.fields[key]) for side in (self.pt, self.ort))
        same = a == b or (math.isnan(a) and math.isnan(b))
        return 0.0 if same else abs(a - b)

    def remark(self) -> str:
        """Describe differences that no number expresses."""
        if self.pt is None or self.ort is None:
            return f"only in {'ort' if self.pt is None else 'pt'}"
        pt, ort = self.pt.fields, self.ort.fields
        return ", ".join(f"{key} differs" for key in _COUNTED if pt[key] != ort[key])


def read_record(path: Path) -> Record:
    """Read a file of statistics. Raises BadFile."""
    lines = path.read_text(encoding="utf-8").splitlines()
    fields = {key: text for key, _, text in (line.partition(":") for line in lines)}
    fields = {key: text.strip() for key, text in fields.items()}
    wanted = {*_ABOUT, *_COMPARED, *_COUNTED, "values"}
    missing = sorted(wanted - fields.keys())
    if missing:
        raise BadFile(f"{path}: got no line '{missing[0]}:', want a file of StatisticsSubscriber")
    numbers = fields.pop("values")
    try:
        int(fields["order"])
        [float(fields[key]) for key in _COMPARED]
    except ValueError as error:
        raise BadFile(f"{path}: {error}") from error
    return Record(fields, numbers.split(", ") if numbers else [])


def read_run(folder: Path) -> dict[int, dict[str, Record]]:
    """Read all files of a run, by step and name. Raises BadFile."""
    return {
        int(step.name.removeprefix("step_")): {
            path.name: read_record(path)
            for path in step.iterdir()
            if path.is_file() and path.name.endswith(_DIRECTIONS)
        }
        for step in folder.iterdir()
        if step.is_dir() and re.fullmatch(r"step_\d+", step.name)
    }


def pairs_of(pt: dict[str, Record], ort: dict[str, Record]) -> list[Pair]:
    """Pair the records of one step, in the order of execution, PyTorch's where it has any."""
    pairs = [Pair(file, pt.get(file), ort.get(file)) for file in {*pt, *ort}]
    return sorted(pairs, key=lambda pair: (pair.record.order, pair.file))


def merge_runs(
    pt: dict[int, dict[str, Record]], ort: dict[int, dict[str, Record]], output: Path
) -> None:
    """Write one file for each activation of each step, and the summary."""
    output.mkdir(parents=True)
    summary = []
    for step in sorted({*pt, *ort}):
        pairs = pairs_of(pt.get(step, {}), ort.get(step, {}))
        folder = output / f"step_{step}"
        folder.mkdir()
        for pair in pairs:
            (folder / pair.file).write_text(merged_text(pair), encoding="utf-8")
        summary += [f"step {step}", "", *_missing_lines(step, pairs, pt, ort)]
        summary += [*_summary_table(pairs), ""]
    (output / SUMMARY).write_text("\n".join(summary), encoding="utf-8")


def merged_text(pair: Pair) -> str:
    """Write the statistics of both runs side by side."""
    rows = [["", *_SIDES, "difference"]]
    for key in pair.record.fields:
        compared = key in _COMPARED and pair.pt and pair.ort
        difference = str(pair.difference(key)) if compared else ""
        rows.append([key, *(_field(side, key) for side in (pair.pt, pair.ort)), difference])
    sides = [side.values if side else [] for side in (pair.pt, pair.ort)]
    for i in range(max(map(len, sides))):
        texts = [side[i] if i < len(side) else "-" for side in sides]
        rows.append([f"value {i}", *texts, _value_difference(*texts)])
    remark = pair.remark()
    return "\n".join([pair.label, *([remark] if remark else []), "", *aligned(rows)]) + "\n"


def _field(side: Record | None, key: str) -> str:
    return side.fields.get(key, "-") if side else "missing"


def _value_difference(a: str, b: str) -> str:
    """Give the distance of two numbers; nothing where one is missing, or for true and false."""
    if a == b:
        return "0.0"
    try:
        return str(abs(complex(a) - complex(b)))
    except ValueError:
        return ""


def _missing_lines(
    step: int, pairs: list[Pair], pt: dict[int, dict], ort: dict[int, dict]
) -> list[str]:
    lines = []
    for side, run in zip(_SIDES, (pt, ort), strict=True):
        missing = [pair.label for pair in pairs if getattr(pair, side) is None]
        if step not in run:
            lines += [f"the {side} run has no such step", ""]
        elif missing:
            lines += [f"missing in the {side} run:", *(f"  {label}" for label in missing), ""]
    return lines


def _summary_table(pairs: list[Pair]) -> list[str]:
    rows = [["activation", *(f"{key} difference" for key in _COMPARED), "remark"]]
    for pair in pairs:
        both = pair.pt is not None and pair.ort is not None
        numbers = [f"{pair.difference(key):.6g}" if both else "-" for key in _COMPARED]
        rows.append([pair.label, *numbers, pair.remark()])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write a table with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip(" |")
        for row in rows
    ]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch_ort.convergence.merge_activation_summary",
        description="Put the statistics of a run in PyTorch and one in the engine side by side.",
    )
    parser.add_argument("--pt_dir", type=Path, required=True, help="folder of the PyTorch run")
    parser.add_argument("--ort_dir", type=Path, required=True, help="folder of the engine's run")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to be made")
    parser.add_argument(
        "--overwrite", action="store_true", help="remove an --output_dir that this command wrote"
    )
    arguments = parser.parse_args(argv)
    for name in ("pt_dir", "ort_dir"):
        folder = getattr(arguments, name)
        if not folder.is_dir():
            parser.error(f"--{name}: got '{folder}', which is no folder")
    output = arguments.output_dir
    if output.exists() and not arguments.overwrite:
        parser.error(f"--output_dir: '{output}' exists; name one that does not, or --overwrite")
    if output.exists() and not (output / SUMMARY).is_file():
        parser.error(f"--output_dir: '{output}' has no {SUMMARY}, so it is not overwritten")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit code."""
    arguments = _arguments(argv)
    runs = []
    try:
        for name in ("pt_dir", "ort_dir"):
            folder = getattr(arguments, name)
            runs.append(read_run(folder))
            if not runs[-1]:
                raise BadFile(f"--{name}: got no folder 'step_N' in '{folder}'")
    except (BadFile, UnicodeDecodeError) as error:
        raise SystemExit(f"error: {error}") from error
    if arguments.output_dir.exists():
        shutil.rmtree(arguments.output_dir)
    merge_runs(*runs, arguments.output_dir)
    print(f"wrote {arguments.output_dir / SUMMARY}")
    return 0
