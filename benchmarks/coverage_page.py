"""The table of docs/coverage.md, between two marks that stay where they are."""

from pathlib import Path

from coverage_rows import EAGER, Coverage, Row
from coverage_worker import COMPILE, ORTMODULE, ROADS

BEGIN, END = "<!-- written by model_coverage.py -->", "<!-- until here -->"
HEADS = (
    "architecture", "kind", "through", "graphs", "captures", "breaks", "fallbacks",
    "calls in the engine", "time in the engine", "own kernels", "loss off by",
    "gradients off by", "first step, s", "step, ms", "/ eager", "peak, MiB", "/ eager",
)  # fmt: skip
ROAD_NAMES = {COMPILE: "`torch.compile`", ORTMODULE: "`ORTModule`"}
MISSING = ""
MOST_REASONS = 3  # of a row; the JSON file has all


def write_page(path: Path, coverage: Coverage) -> None:
    """Write the table, and what stands below it, into a page that has the marks.

    Raises ValueError if it does not have them.
    """
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path}: no lines {BEGIN!r} and {END!r}")
    path.write_text(f"{before}{BEGIN}\n{render(coverage)}{END}{after}")


def render(coverage: Coverage) -> str:
    """Return the table in Markdown, a summary above it and reasons below it."""
    lines = [summary(coverage), "", machine(coverage), "", *table(coverage)]
    reasons = [line for row in coverage.of_roads(*ROADS) for line in reasons_of(row)]
    if reasons:
        lines += [
            "",
            "What ran in eager PyTorch, or was captured by AOTAutograd, and why:",
            "",
            *reasons,
        ]
    return "\n".join(lines) + "\n"


def summary(coverage: Coverage) -> str:
    """Say in one line how many are whole and right."""
    words = []
    for road in ROADS:
        rows = coverage.of_roads(road)
        whole = sum(
            row.is_whole and row.is_accurate(coverage.tolerance(row.architecture)) for row in rows
        )
        words.append(f"{whole} of {len(rows)} through {ROAD_NAMES[road]}")
    return f"Captured whole, with eager's losses: {' and '.join(words)}."


def machine(coverage: Coverage) -> str:
    settings = coverage.settings
    return (
        f"Taken with PyTorch {settings['torch']}, transformers {settings['transformers']}, "
        f"Python {settings['python']}, {settings['threads']} thread(s), {settings['cpu']}."
    )


def table(coverage: Coverage) -> list[str]:
    lines = ["| " + " | ".join(HEADS) + " |", "| --- " * 3 + "| ---: " * (len(HEADS) - 3) + "|"]
    for row in coverage.of_roads(*ROADS):
        eager = coverage.row(row.architecture, EAGER)
        is_wrong = not row.is_accurate(coverage.tolerance(row.architecture))
        lines.append("| " + " | ".join(cells(row, eager, is_wrong)) + " |")
    return lines


def cells(row: Row, eager: Row | None, is_wrong: bool) -> list[str]:
    start = [row.architecture, row.kind, ROAD_NAMES[row.road]]
    found, theirs = row.measured, eager.measured if eager else {}
    if row.error is not None:
        return [*start, "failed", *[MISSING] * (len(HEADS) - 4)]
    return [
        *start,
        *(str(found[name]) for name in ("graphs", "captures", "breaks")),
        str(found["fallbacks"] + found["refused"]),
        percent(row.share_of_engine("calls")), percent(row.share_of_engine("us")),
        percent(row.share_of_own_kernels),
        marked(found["loss_difference"], is_wrong),
        f"{found['gradient_difference']:.0e}",
        f"{found['first_step_s']:.2f}", f"{1e3 * found['step_s']:.1f}",
        ratio(found["step_s"], theirs.get("step_s")),
        mebibytes(found["peak_bytes"]), ratio(found["peak_bytes"], theirs.get("peak_bytes")),
    ]  # fmt: skip


def reasons_of(row: Row) -> list[str]:
    """Return a line of Markdown that names the first reasons, if there are any."""
    name = f"{row.architecture}, {ROAD_NAMES[row.road]}"
    if row.error is not None:
        return [f"- {name}: failed: {plain(row.error)}"]
    reasons = row.measured["reasons"]
    more = f", and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
    shown = "; ".join(map(plain, reasons[:MOST_REASONS]))
    return [f"- {name}: {shown}{more}"] if reasons else []


def plain(words: str) -> str:
    """Return words of a log as Markdown that shows them as they are, on one line."""
    return "`" + " ".join(words.replace("`", "'").split()) + "`"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}%".replace("100.0%", "100%")


def marked(value: float, is_wrong: bool) -> str:
    return f"**{value:.0e}**" if is_wrong else f"{value:.0e}"


def ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours is not None and theirs else MISSING


def mebibytes(value: int | None) -> str:
    return MISSING if value is None else f"{value / 2**20:.1f}"
