"""The table of what is expected of each program on each road: `table.txt`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("table.txt")

# The columns of numbers, and the counters that they are of. All but the first should be 0; a row
# where one is not has a reason.
COLUMNS = {
    "graphs": "graphs_captured",
    "handed over": "recordings_handed_over",
    "fallbacks": "fallbacks",
    "frames": "frames_left_to_eager",
    "breaks": "graph_breaks",
    "refused": "captures_refused",
    "calls": "calls_left_to_eager",
}


@dataclass(frozen=True)
class Row:
    """What a program does on one road: numbers by column, and why they are not 0."""

    counts: dict[str, int]
    reason: str = ""

    @property
    def needs_reason(self) -> bool:
        """Tell whether the engine ran less than all, or AOTAutograd captured a graph."""
        return any(count for column, count in self.counts.items() if column != "graphs")


Key = tuple[str, str]  # program and road


def row_of(counters: dict[str, int], reason: str = "") -> Row:
    """Make a row of the counters after a run."""
    return Row({column: counters[name] for column, name in COLUMNS.items()}, reason)


def read_table() -> dict[Key, Row]:
    """Read the rows by program and road."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line][1:]
    return {
        (name, road): Row(dict(zip(COLUMNS, map(int, counts), strict=True)), reason)
        for name, road, *counts, reason in rows
    }


def accept(key: Key, row: Row) -> None:
    """Write a row into the table; the reason of the row that it replaces stays."""
    rows = read_table()
    old = rows.get(key)
    rows[key] = Row(row.counts, old.reason if old and row.needs_reason else "")
    cells = [["program", "road", *COLUMNS, "why"]]
    for (name, road), one in sorted(rows.items()):
        cells.append([name, road, *map(str, one.counts.values()), one.reason])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
