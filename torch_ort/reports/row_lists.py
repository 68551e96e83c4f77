"""Row sparsity in `explain`: which rows a graph computes and which it leaves out, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_ort.core.words import listed
from torch_ort.engine.program import Program

_NAME = "torch_ort.Rows"
_MOST_LINES = 8  # of the user's code, in text


@dataclass
class RowList:
    """One list of rows that are needed; the nodes that use it do not compute the others.

    In the last call `count` of `num_rows` rows were in the list; both are None before the first.
    `chosen_by` says in words what determines the rows, `readers` counts by op the nodes that
    compute only these rows, and `origins` are the lines of the user's program that those come from.
    """

    name: str
    chosen_by: list[str]
    readers: Counter[str]
    origins: list[str]
    count: int | None = None
    num_rows: int | None = None

    @property
    def density(self) -> float | None:
        """Give the part of the rows that is computed, from 0 to 1; None before the first call."""
        return None if self.count is None else self.count / max(self.num_rows, 1)


def lines_of(lists: Sequence[RowList]) -> list[str]:
    """Give the lines of a report; lists that read the same, as of layers, are one there."""
    groups: dict[str, list[RowList]] = {}
    for each in lists:
        seen = "unknown before the first call"
        if each.count is not None:
            seen = f"{each.count:,} of {each.num_rows:,} ({each.density:.2%})"
        line = f"  rows computed: {seen}, chosen by {listed(each.chosen_by)}"
        groups.setdefault(line, []).append(each)
    lines = []
    for title, group in groups.items():
        readers = sum((each.readers for each in group), Counter())
        origins = [*dict.fromkeys(origin for each in group for origin in each.origins)]
        more = len(origins) - _MOST_LINES
        places = origins[:_MOST_LINES] + ([f"{more} more"] if more > 0 else [])
        counts = ", ".join(f"{op} {count}" for op, count in readers.most_common())
        lines += [title, f"    by {counts}" + (f", of {listed(places)}" if places else "")]
    return lines


def row_lists(program: Program) -> list[RowList]:
    """Give the lists of a graph beside which rows are left out, those of the most rows first."""
    nodes = program.graph.nodes()
    made_by = {output: node for node in nodes for output in node["outputs"]}
    steps = program.session.steps()
    origin_of = {name: origin for name, _, _, _, origin in steps}
    counts = {name: (count, num_rows) for name, count, num_rows in program.session.row_lists()}
    found = []
    for node in nodes:
        # A node with two lists, such as attention with those of queries and of keys, may have one
        # that lists all rows.
        if f"{node['domain']}.{node['op']}" != _NAME or node["attrs"].get("is_all"):
            continue
        readers = [each for each in nodes if node["outputs"][0] in each["inputs"]]
        origins = dict.fromkeys(origin_of.get(each["name"], "") for each in readers)
        found.append(
            RowList(
                node["name"],
                _chosen_by(node, made_by, origin_of),
                Counter(f"{each['domain']}.{each['op']}" for each in readers),
                [origin for origin in origins if origin],
                *counts.get(node["name"], (None, None)),
            )
        )
    return sorted(found, key=lambda each: -(each.count or 0))


def _chosen_by(
    node: dict[str, Any], made_by: dict[str, dict[str, Any]], origin_of: dict[str, str]
) -> list[str]:
    attrs = node["attrs"]
    words = []
    sources: Sequence[tuple[str, str, int]] = [
        *zip(node["inputs"], attrs.get("kinds", []), attrs.get("ignored", []), strict=True)
    ]
    for name, kind, ignored in sources:
        origin = origin_of.get(made_by[name]["name"], "") if name in made_by else ""
        place = f"of {origin}" if origin else f"'{name}'"
        if kind == "labels":
            words.append(f"the labels {place} that are not {ignored}")
        else:
            words.append(f"the keys that the mask {place} shows")
    words += [f"place {place} of each sequence" for place in attrs.get("places", [])]
    if attrs.get("is_closed"):
        words.append("all places before these")
    return [*dict.fromkeys(words)]
