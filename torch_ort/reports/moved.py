"""Which bytes the nodes of a graph read and write."""

from __future__ import annotations

from typing import Any

from torch_ort import _C

VIEW_FORMS = ("view", "reshape")  # of steps that may be views
SLICE_SCATTER = "SliceScatter"  # where it overwrites the whole, it writes the part alone


def moved_bytes(graph: _C.Graph, session: _C.Session) -> dict[str, tuple[int, int]]:
    """Give the bytes that nodes read and write by the plan used last; views are left out."""
    rows = {row["name"]: row for row in session.plan_table() if row["first_step"] is not None}
    works = {name for name, _, form, _, _ in session.steps() if form not in VIEW_FORMS}

    def total(names: list[str]) -> int:
        return sum(rows[name]["element_bytes"] for name in set(names) if name in rows)

    def is_view(node: dict[str, Any]) -> bool:
        made = [rows[name] for name in node["outputs"] if name in rows]
        return node["name"] not in works and all(row["shares"] for row in made)

    def moved(node: dict[str, Any]) -> tuple[int, int]:
        if node["op"] == SLICE_SCATTER and rows[node["outputs"][0]]["in_place_of"]:
            return total(node["inputs"][:1]), total(node["inputs"][:1])
        return total(node["inputs"]), total(node["outputs"])

    return {
        node["name"]: moved(node)
        for node in graph.nodes() if node["op"] != "YieldOp" and not is_view(node)
    }  # fmt: skip
