"""Tables of a report, and how they read as text."""

from __future__ import annotations

from collections.abc import Sequence

Cell = str | tuple[float, str]  # a text, or a number with the text that shows it


Table = tuple[Sequence[str], Sequence[Sequence[Cell]]]  # heads, rows


def columns(table: Table) -> list[str]:
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


def time_text(microseconds: float) -> str:
    """Give a time with three digits in its unit: `1.00 s`, `12.3 ms`, `45.0 µs`."""
    for factor, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        # A number that rounds up to 1000 is written in the next unit.
        if abs(microseconds) >= 0.9995 * factor:
            return f"{_three_digits(microseconds / factor)} {unit}"
    return f"{microseconds:.2f} µs" if microseconds else "0 µs"


def _three_digits(number: float) -> str:
    places = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{places}f}"


def bytes_text(count: float) -> str:
    """Give a number of bytes in its unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
