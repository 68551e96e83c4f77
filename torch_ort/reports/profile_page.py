"""A profile as one page of HTML: what shows is made here, profile_page.html sorts and zooms."""

from __future__ import annotations

import string
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from torch_ort.reports.profile_rows import Bar, GraphProfile
from torch_ort.reports.tables import Cell, Table, bytes_text

_TEMPLATE = Path(__file__).with_suffix(".html")
_LANE = 30  # height of a row of bars


def render(profile: Any) -> str:
    """Give the page of a Profile."""
    number = profile.bars_of
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        summary=escape(profile.summary()),
        peak=f"<p>{escape(text)}</p>" if (text := profile.peak_text()) else "",
        fallbacks="".join(f"<p class=bad>Fell back: {escape(r)}</p>" for r in profile.fallbacks),
        chosen=f"step {number + 1} of {len(profile.wall)}, {profile.wall[number]:.1f} us",
        timeline=_timeline(profile),
        kinds=_table(profile.sum_table("kind", profile.kinds)),
        outside=_table(profile.sum_table("outside the steps", profile.outside)),
        steps=_table(profile.step_table(profile.steps)),
        memory="".join(_memory(i, graph) for i, graph in enumerate(profile.graphs)),
        regions="".join(_regions(i, graph) for i, graph in enumerate(profile.graphs)),
    )


def _table(table: Table) -> str:
    def cell(content: Cell) -> str:
        if isinstance(content, tuple):
            number, text = content
            return f"<td class=number data-value={number:.6g}>{escape(text)}</td>"
        return f"<td>{escape(content)}</td>"

    heads, rows = table
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    return (
        f'<rect x="{x:.3f}" y="{y:g}" width="{width:.3f}" height="{height:g}" '
        f'class="{escape(kind)}" data-tip="{escape(tip)}"/>'
    )


def _svg(width: float, height: float, rects: Iterable[str]) -> str:
    body = "\n".join(rects)
    return f'<svg viewBox="0 0 {width:.3f} {height:g}" preserveAspectRatio="none">\n{body}\n</svg>'


def _timeline(profile: Any) -> str:
    """Draw the halves of graphs, below them their steps, and last the memory in use."""
    rects = [
        _rect(bar.start, _LANE if bar.step else 0, bar.length, _LANE - 2,
              bar.step.kind if bar.step else "run", _bar_tip(bar))
        for bar in profile.bars
    ]  # fmt: skip
    in_use = [
        (bar, profile.graphs[bar.step.graph].in_use.get(bar.step.name, 0))
        for bar in profile.bars if bar.step
    ]  # fmt: skip
    most = max((count for _, count in in_use), default=0)
    for bar, count in in_use:
        if count:
            height = 2 * _LANE * count / most
            tip = f"{bar.name}\n{bytes_text(count)} in use by graph {bar.step.graph}"
            rects.append(_rect(bar.start, 4 * _LANE - height, bar.length, height, "memory", tip))
    return _svg(profile.wall[profile.bars_of], 4 * _LANE, rects)


def _bar_tip(bar: Bar) -> str:
    lines = [bar.name, f"{bar.length:.1f} \u00b5s"]
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
            areas.append(f"<h4>{area}, {bytes_text(size)}</h4>{_svg(end, size, map(_place, rows))}")
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
