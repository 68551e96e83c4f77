"""Random training graphs under a memory budget: the same bits, and no more held than allowed."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random_borders import crossing, programs, read, run
from torch_ort._C import UserError

from torch_ort import _C

SPEEDS = ({"float32": 5e10, "float64": 2.5e10, "bfloat16": 5e10}, 1e10)


def run_passes(graph: _C.Graph, amount: float, is_fraction: bool) -> _C.BudgetReport:
    report = _C.BudgetReport()
    budget = _C.Budget(amount, is_fraction, *SPEEDS)
    _C.run_pipeline(graph, check=2, budget=budget, budget_report=report)
    return report


def held(graph: _C.Graph) -> int:
    """Give the bytes that cross, without results of the module."""
    (border,) = [node for node in graph.nodes() if node["op"] == "YieldOp"]
    leaving = set(border["inputs"])
    return sum(size for name, size in crossing(graph).items() if name not in leaving)


@pytest.mark.parametrize("dtype", ["float", "double", "bfloat16"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_same_bits_within_the_budget(dtype: str, data: st.DataObject) -> None:
    """The least that a refusal names can be had. Short floats: where every value is rounded."""
    graph = read(data.draw(programs(dtype)))
    emulate = dtype == "bfloat16"
    fraction = data.draw(st.sampled_from((0.1, 0.3, 0.5, 0.8, 1.0)))
    kept, budgeted = graph.clone(), graph.clone()
    _C.run_pipeline(kept, check=2)
    try:
        report = run_passes(budgeted, fraction, is_fraction=True)
    except UserError as error:
        least = int(re.search(r"at least ([\d,]+) bytes", str(error))[1].replace(",", ""))
        budgeted = graph.clone()
        report = run_passes(budgeted, least, is_fraction=False)
        assert report.allowed_bytes == least

    for got, want in zip(run(budgeted, emulate), run(kept, emulate), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert report.held_bytes <= report.peak_bytes <= report.allowed_bytes
    assert report.dense_bytes == held(kept)
    assert held(budgeted) <= report.held_bytes


def run_selected(
    graph: _C.Graph, chosen: list[tuple[str, int, int]], lists_all: bool = False
) -> _C.BudgetReport:
    report = _C.BudgetReport()
    selection = _C.Selection(0, chosen, True, False, lists_all)
    _C.run_pipeline(graph, check=2, selection=selection, budget_report=report)
    return report


@pytest.mark.parametrize("dtype", ["float", "double", "bfloat16"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_same_bits_with_clusters_made_again(dtype: str, data: st.DataObject) -> None:
    """Any of those that are listed, together; alone each saves what is said."""
    graph = read(data.draw(programs(dtype)))
    emulate = dtype == "bfloat16"
    kept = graph.clone()
    _C.run_pipeline(kept, check=2)
    listed = run_selected(graph.clone(), [], lists_all=True)
    assert listed.dense_held_bytes == held(kept)
    rows = [row for row in listed.clusters if data.draw(st.booleans())]
    chosen = {row["name"]: (row["name"], row["type"], -1) for row in rows}
    together = graph.clone()
    report = run_selected(together, list(chosen.values()))
    assert held(together) <= report.held_bytes <= report.peak_bytes
    for got, want in zip(run(together, emulate), run(kept, emulate), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    for row in rows:
        alone = run_selected(graph.clone(), [(row["name"], row["type"], -1)])
        assert alone.held_bytes == listed.dense_held_bytes - row["saved_bytes"]


def deep(depth: int = 8) -> str:
    """Write products in a row, all of which backward reads."""
    forward = "\n".join(f"k{i} = MatMul (k{i - 1}, w)" for i in range(1, depth))
    backward = "\n".join(f"g{i} = Mul (g{i + 1}, k{i})" for i in reversed(range(1, depth)))
    return f"""
        <ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
        deep (float[N,4] k0, float[4,4] w) => (float[N,4] g1, float[N,4] g)
        <float[N,4] g{depth}>
        {{
            {forward}
            y = MatMul (k{depth - 1}, w)
            g{depth} = com.microsoft.YieldOp (y)
            {backward}
            h = MatMul (g1, w)
            g = Mul (h, k0)
        }}
    """


def test_copies_tell_their_segment_and_are_in_no_checkpoint() -> None:
    """Segments of a budget and checkpoints of PyTorch are numbered apart."""
    graph = read(deep())
    budget = _C.Budget(0.75, True, *SPEEDS)
    _C.run_pipeline(graph, disabled=["fuse_regions"], budget=budget)
    border = [node["op"] for node in graph.nodes()].index("YieldOp")
    copies = [node for node in graph.nodes()[border:] if node["name"].endswith("_again")]
    assert len({node["segment"] for node in copies}) > 1
    assert all(node["segment"] >= 0 for node in copies)
    others = [node for node in graph.nodes() if node not in copies]
    assert {node["segment"] for node in others} == {-1}
    assert {node["checkpoint"] for node in graph.nodes()} == {-1}


@pytest.mark.parametrize("limit", range(6))
def test_any_part_of_the_rewrites_is_right(limit: int) -> None:
    """What `bisect` cuts off is held after all."""
    kept, cut = read(deep()), read(deep())
    done = sum(count for _, count, _ in _C.run_pipeline(kept, disabled=["fuse_regions"]))
    report, budget = _C.BudgetReport(), _C.Budget(0.8, True, *SPEEDS)
    _C.run_pipeline(
        cut, disabled=["fuse_regions"], bisect=done + limit, check=2, budget=budget,
        budget_report=report,
    )  # fmt: skip
    assert len(report.made) == 2
    assert held(kept) - held(cut) == 48 * min(limit, 2)
    for got, want in zip(run(cut, False), run(kept, False), strict=True):
        assert torch.equal(got, want)
