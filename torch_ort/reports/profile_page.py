"""A profile as one page of HTML: what shows is made here, profile_page.html sorts and zooms."""

from __future__ import annotations

import statistics
import string
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch_ort.reports.profile_rows import (
    KINDS,
    Bar,
    Collective,
    Flight,
    GraphProfile,
    StepTimes,
)
from torch_ort.reports.tables import Cell, Table, bytes_text, time_text

_TEMPLATE = Path(__file__).with_suffix(".html")
_LANE = 30  # height of a row of bars
_TICKS = 10  # most of them on an axis before it is zoomed
_LAST_TICK = 0.97  # beyond this part of an axis, the text of a tick does not fit


def render(profile: Any) -> str:
    """Give the page of a Profile."""
    number = profile.bars_of
    kinds = [kind for kind in KINDS if any(step.kind == kind for step in profile.ranked)]
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        summary=_cards(profile),
        peak="".join(
            f"<p>{escape(text)}</p>"
            for text in (profile.peak_text(), profile.collective_text())
            if text
        ),
        fallbacks="".join(f"<p class=bad>Fell back: {escape(r)}</p>" for r in profile.fallbacks),
        breaks=_breaks(profile),
        chosen=f"step {number + 1} of {len(profile.wall)}, {time_text(profile.wall[number])}",
        key="".join(f'<span class="key {kind}"></span>{kind}' for kind in kinds),
        timeline=_timeline(profile),
        kinds=_table(profile.sum_table("kind", profile.kinds)),
        outside=_table(profile.sum_table("outside the steps", profile.outside)),
        steps=_steps(profile),
        collectives=_collectives(profile),
        folded=_folded("views that cost nothing: made once, with the plan", profile.free)
        + _folded("steps that did not run", profile.idle),
        memory="".join(_memory(i, graph) for i, graph in enumerate(profile.graphs)),
        regions="".join(_regions(i, graph) for i, graph in enumerate(profile.graphs)),
    )


def _cards(profile: Any) -> str:
    cards = [
        (time_text(statistics.median(profile.wall)), f"median of {len(profile.wall)} steps"),
        (time_text(min(profile.wall)), "fastest step"),
        (f"{profile.inside:.1%}", "of the time in the engine's steps"),
    ]
    if (part := profile.of_peak) is not None:
        cards.append((f"{part:.0%}", "of the machine's peak, in products"))
    peaks = [graph.plan["peak_bytes"] for graph in profile.graphs if graph.plan]
    if peaks:
        cards.append((bytes_text(max(peaks)), "planned memory at most, of a graph"))
    cards.append((str(len(profile.graphs)), "graph" if len(profile.graphs) == 1 else "graphs"))
    return "".join(
        f"<div class=card><b>{escape(value)}</b><span>{escape(words)}</span></div>"
        for value, words in cards
    )


def _collectives(profile: Any) -> str:
    """List what ranks communicate; nothing where they do not."""
    if not profile.collectives:
        return ""
    table = _table(profile.collective_table())
    return f'<h2>Collectives</h2>\n<div class="scroll">{table}</div>'


def _breaks(profile: Any) -> str:
    """List what Dynamo left to eager PyTorch: where, why, and how much."""
    if not profile.breaks:
        return ""
    rows = [(str(each.line), each.reason, each.subject) for each in profile.breaks]
    table = _table((("line", "Dynamo's reason", "left to eager PyTorch"), rows))
    return f'<h2>Graph breaks</h2>\n<div class="breaks">{table}</div>'


def _table(table: Table) -> str:
    heads, rows = table
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _cell(content: Cell) -> str:
    if isinstance(content, tuple):
        number, text = content
        return f"<td class=number data-value={number:.6g}>{escape(text)}</td>"
    return f"<td>{escape(content)}</td>"


# The columns of the table of steps, with explanations.
_STEP_HEADS = (
    ("share", "part of all measured time"),
    ("per call", "median of a call"),
    ("fastest", "the fastest call"),
    ("calls", "in all measured steps"),
    ("step", "the node, and the operator that it calls"),
    ("your line", "where it comes from; in backward, the line whose gradient it computes"),
    ("half", "which half of which graph"),
    ("runs as", "what it is, and whose code runs it"),
    ("product", "rows × summed over × columns"),
    ("rate", "of products, else of memory"),
    ("of peak", "part of the machine's peak"),
    ("moved", "bytes read, and below them bytes written"),
)
_NUMBERS = {"share", "per call", "fastest", "calls", "rate", "of peak", "moved"}


def _steps(profile: Any) -> str:
    """Give the steps that ran, the costliest first: all of it fits a page of 1,400 pixels."""
    heads = "".join(
        f'<th class="{"number" if name in _NUMBERS else ""}" title="{escape(tip)}">{name}</th>'
        for name, tip in _STEP_HEADS
    )
    steps = profile.ranked
    most = max((step.total for step in steps), default=1.0)
    rows = "\n".join(_step_row(profile, step, step.total / most) for step in steps)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _step_row(profile: Any, step: StepTimes, part: float) -> str:
    share, (rate, unit) = profile.share(step.total), step.rate
    moved = (step.read_bytes, step.written_bytes)
    bar = f'<i class="bar {step.kind}" style="width:{100 * part:.1f}%"></i>'
    return "".join((
        f"<tr><td class='number share' data-value={share:.6g}>{share:.1%}{bar}</td>",
        _cell((step.median, time_text(step.median))),
        _cell((step.min, time_text(step.min))),
        _cell((len(step.microseconds), str(len(step.microseconds)))),
        _two_lines(step.name, step.op, "name"),
        f"<td class=line>{escape(step.origin)}</td>",
        _two_lines(step.half, f"graph {step.graph}"),
        _two_lines(step.kind, step.where),
        f"<td>{escape(step.sizes)}</td>",
        _cell((rate, f"{rate:.1f} {unit}" if rate else "")),
        _cell((step.of_peak or 0.0, "" if step.of_peak is None else f"{step.of_peak:.0%}")),
        f"<td class=number data-value={sum(moved)}>{bytes_text(moved[0])}"
        f" <small>{bytes_text(moved[1])}</small></td></tr>",
    ))  # fmt: skip


def _two_lines(first: str, second: str, kind: str = "") -> str:
    # The space separates the two if the page is read as text.
    return (
        f'<td class="{kind}" title="{escape(first)}">{escape(first)}'
        f" <small>{escape(second)}</small></td>"
    )


def _folded(words: str, steps: Sequence[StepTimes]) -> str:
    """Give a list that is open on demand; nothing where it would be empty."""
    if not steps:
        return ""
    rows = [(step.name, step.op, step.half, str(step.graph), step.origin) for step in steps]
    table = _table((("step", "op", "half", "graph", "your line"), rows))
    return f"<details><summary>{len(steps)} {words}</summary>{table}</details>\n"


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    return (
        f'<rect x="{x:.3f}" y="{y:g}" width="{width:.3f}" height="{height:g}" '
        f'class="{escape(kind)}" data-tip="{escape(tip)}"/>'
    )


def _chart(
    width: float, height: float, rects: Iterable[str], unit: str, lanes: Sequence[str]
) -> str:
    """Draw rectangles over an axis, which the page draws anew where it zooms."""
    step = _tick_distance(width / _TICKS)
    ticks = "".join(
        f'<span style="left:{100 * i * step / width:.3f}%">{escape(_tick(i * step, unit))}</span>'
        for i in range(int(_LAST_TICK * width / step) + 1)
    )
    body = "\n".join(rects)
    names = "".join(f"<span>{escape(name)}</span>" for name in lanes)
    return (
        f'<div class="chart"><div class="lanes">{names}</div><div class="plot">'
        f'<svg viewBox="0 0 {width:.3f} {height:g}" preserveAspectRatio="none">\n{body}\n</svg>'
        f'<div class="axis" data-unit="{unit}">{ticks}</div></div></div>'
    )


def _tick_distance(least: float) -> float:
    """Give the next of 1, 2 and 5 times a power of ten; profile_page.html does the same."""
    power = 10.0 ** len(str(int(least))[1:]) if least >= 1 else 1.0
    return next(power * each for each in (1, 2, 5, 10) if power * each >= least)


def _tick(value: float, unit: str) -> str:
    if unit == "steps":
        return f"{value:g}"
    if value == 0:
        return "0"
    if value >= 1e6:
        return f"{value / 1e6:g} s"
    return f"{value / 1e3:g} ms" if value >= 1e3 else f"{value:g} µs"


def _timeline(profile: Any) -> str:
    """Draw the halves of graphs, their steps, what is in flight between ranks, memory in use."""
    rects = [
        _rect(bar.start, _LANE if bar.step else 0, bar.length, _LANE - 2,
              bar.step.kind if bar.step else "run", _bar_tip(bar))
        for bar in profile.bars
    ]  # fmt: skip
    flights = [
        _rect(flight.begin, 2 * _LANE, flight.length, _LANE - 2, "flight",
              _flight_tip(each, flight))
        for each in profile.collectives for flight in each.flights if flight.run == profile.bars_of
    ]  # fmt: skip
    rects += flights
    lanes = ["graph", "steps", *(["in flight"] if flights else [])]
    above = len(lanes) * _LANE
    in_use = [
        (bar, profile.graphs[bar.step.graph].in_use.get(bar.step.name, 0))
        for bar in profile.bars if bar.step
    ]  # fmt: skip
    most = max((count for _, count in in_use), default=0)
    for bar, count in in_use:
        if count:
            height = 2 * _LANE * count / most
            tip = f"{bar.name}\n{bytes_text(count)} in use by graph {bar.step.graph}"
            top = above + 2 * _LANE - height
            rects.append(_rect(bar.start, top, bar.length, height, "memory", tip))
    lanes.append(f"memory, up to {bytes_text(most)}")
    height = above + 2 * _LANE
    return _chart(profile.wall[profile.bars_of], height, rects, "time", lanes)


def _flight_tip(collective: Collective, flight: Flight) -> str:
    lines = [
        collective.start.name,
        f"{collective.start.op}, group {collective.group}, {bytes_text(collective.num_bytes)}",
        f"{time_text(flight.length)} in flight, {time_text(flight.waited)} waited for",
        f"{time_text(flight.beside_products)} beside products",
    ]
    return "\n".join(lines)


def _bar_tip(bar: Bar) -> str:
    name = bar.name if bar.step else f"{bar.name.removeprefix('torch_ort::run_')} half of a graph"
    lines = [name, time_text(bar.length)]
    if bar.step:
        step = bar.step
        lines[1:1] = [f"{step.op} ({step.where}), graph {step.graph}, {step.half}"]
        lines += [f"reads {bytes_text(step.read_bytes)}, writes {bytes_text(step.written_bytes)}"]
        lines += [f"from {step.origin}"] if step.origin else []
    return "\n".join(lines)


def _memory(number: int, graph: GraphProfile) -> str:
    title = f"<h3>Graph {number} ({'training' if graph.is_training else 'inference'})</h3>"
    if not graph.plan:
        return f"{title}<p>It never ran, so there is no plan.</p>"
    plan = graph.plan
    words = (
        f"Peak {bytes_text(plan['peak_bytes'])}, saved for backward "
        f"{bytes_text(plan['saved_bytes'])}, {plan['in_place']} results in place of an operand."
    )
    end = 1 + max((row["last_step"] for row in graph.memory), default=0)
    areas = []
    for area in ("context", "scratch"):
        rows = [row for row in graph.memory if row["area"] == area]
        if rows:
            size = plan[f"{area}_bytes"]
            chart = _chart(end, size, map(_place, rows), "steps", ("0", bytes_text(size)))
            areas.append(f"<h4>{area}, {bytes_text(size)}</h4>{chart}")
    return f"{title}<p>{words}</p>{''.join(areas) or '<p>The plan holds no tensors.</p>'}"


def _place(row: dict[str, Any]) -> str:
    """Draw where a tensor lies, and in which steps."""
    first, length = row["first_step"], row["last_step"] + 1 - row["first_step"]
    return _rect(first, row["offset"], length, row["bytes"], "tensor", _row_tip(row))


def _row_tip(row: dict[str, Any]) -> str:
    lines = [
        row["name"],
        f"{row['kind']}, {bytes_text(row['bytes'])} at {row['offset']}",
        f"steps {row['first_step']} to {row['last_step']}",
    ]
    return "\n".join(lines + ([f"in place of {row['in_place_of']}"] if row["in_place_of"] else []))


def _regions(number: int, graph: GraphProfile) -> str:
    return "".join(
        f"<details><summary>{escape(region.name)}: {region.num_nodes} nodes, graph {number}"
        f"</summary><h4>Body</h4><pre>{escape(region.body)}</pre><h4>Tile program</h4>"
        f"<pre>{escape(region.program or 'It never ran, so it has no program.')}</pre></details>\n"
        for region in graph.regions
    )
