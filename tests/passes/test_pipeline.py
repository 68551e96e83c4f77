"""What surrounds passes: order, switches, halving, checks, errors."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest
from test_cases import graph_text, read_graph

import torch_ort
from torch_ort import _C
from torch_ort.options import TABLE

TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
graph (float[N,4] x) => (float[N,4] y)
{
   a = Exp (x)
   b = Identity (a)
   c = Exp (x)
   d = Tanh (c)
   y = Mul (b, a)
}
"""

# What backward reads of forward can be made of `gate`, which crosses anyway.
TRAINING = """
<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1, "org.pytorch.aten" : 1]>
gated (float[N,4] x, float[4,8] w, float[4,8] v, float[8,8] u) => (float[N,8] gup, float[N,8] ggate)
<float[N,8] gy>
{
   gate = MatMul (x, w)
   up = MatMul (x, v)
   active = Swish (gate)
   product = Mul (active, up)
   y = MatMul (product, u)
   gy = com.microsoft.YieldOp (y)
   gup = Mul (gy, active)
   gactive = Mul (gy, up)
   ggate = org.pytorch.aten.ATen <operator = "aten::silu_backward", overload_name = "",
     tensor_args = ["grad_output", "self"]> (gactive, gate)
}
"""


def test_all_passes_together() -> None:
    graph = read_graph(TEXT)
    report = _C.run_pipeline(graph, check=2)
    assert [name for name, _, _ in report] == _C.pass_names()
    assert {name: count for name, count, _ in report if count > 0} == {
        "remove_identity": 1,
        "merge_equal": 1,
        "remove_dead": 1,
        "fuse_regions": 1,
    }
    assert all(milliseconds >= 0 for _, _, milliseconds in report)
    (region,) = graph.nodes()
    assert region["op"] == "Region"
    assert [node["op"] for node in region["attrs"]["body"].nodes()] == ["Exp", "Mul"]


def test_disabled_passes_do_not_run() -> None:
    graph = read_graph(TEXT)
    report = _C.run_pipeline(graph, disabled=["remove_identity", "fuse_regions", "a feature"])
    assert {"remove_identity", "fuse_regions"}.isdisjoint(name for name, _, _ in report)
    assert "Identity" in [node["op"] for node in graph.nodes()]


def test_values_are_rebuilt_where_regions_are_made() -> None:
    def names_after(*disabled: str) -> set[str]:
        graph = read_graph(TRAINING)
        _C.run_pipeline(graph, disabled=list(disabled), check=2)
        bodies = [node["attrs"]["body"] for node in graph.nodes() if node["op"] == "Region"]
        return {
            out for each in (graph, *bodies) for node in each.nodes() for out in node["outputs"]
        }

    assert any("_again" in name for name in names_after())
    assert not any("_again" in name for name in names_after("fuse_regions"))


def test_facts_name_passes_and_options() -> None:
    names = _C.pass_names()
    facts = _C.passes()
    assert [each.name for each in facts] == names
    assert {each.only_with for each in facts} <= {None, *names}
    flags = {row.name for row in TABLE if isinstance(row.default, bool)}
    assert {option for each in facts for option in (each.not_with, each.only_under)} <= {
        None, *flags,
    }  # fmt: skip


def test_bisect_stops_after_that_many_rewrites() -> None:
    counts = []
    for bisect in range(6):
        graph = read_graph(TEXT)
        report = _C.run_pipeline(graph, bisect=bisect, check=2)
        counts.append(sum(count for _, count, _ in report))
    assert counts == [0, 1, 2, 3, 4, 4]
    unchanged = read_graph(TEXT)
    _C.run_pipeline(unchanged, bisect=0)
    assert graph_text(unchanged) == graph_text(read_graph(TEXT))
    # The limit ends with the pipeline that it was given to.
    assert _C.run_pass("remove_identity", unchanged) == 1


def test_a_pipeline_within_another_leaves_it_its_limit() -> None:
    def run_another(_: str) -> None:
        _C.run_pipeline(read_graph(TEXT), bisect=2)
        _C.run_pass("remove_identity", read_graph(TEXT))

    report = _C.run_pipeline(read_graph(TEXT), bisect=2, dump=run_another)
    assert [name for name, count, _ in report if count > 0] == ["remove_identity", "merge_equal"]


def test_bisect_counts_what_happened() -> None:
    # A dropout out of training is looked at and left as it is.
    text = TRAINING.replace("gate = MatMul (x, w)", "kept = Dropout (x) gate = MatMul (kept, w)")
    optional = {each.name for each in _C.passes() if not each.is_needed}

    def count(bisect: int) -> int:
        report = _C.run_pipeline(read_graph(text), bisect=bisect, check=2)
        return sum(rewrites for name, rewrites, _ in report if name in optional)

    total = count(-1)
    assert total > 2
    assert [count(bisect) for bisect in range(total + 2)] == [*range(total + 1), total]


def test_dump_is_called_after_passes_that_changed_something() -> None:
    names: list[str] = []
    _C.run_pipeline(read_graph(TEXT), dump=names.append)
    changed = ["remove_identity", "merge_equal", "remove_dead", "fuse_regions"]
    places = [_C.pass_names().index(name) + 1 for name in changed]
    assert names == [f"{place:02}_{name}" for place, name in zip(places, changed, strict=True)]


def test_unknown_pass_lists_the_known_ones() -> None:
    with pytest.raises(
        torch_ort.UserError, match=r"unknown pass: got 'fuse_all', want one of .*remove_dead"
    ):
        _C.run_pass("fuse_all", read_graph(TEXT))


def test_errors_name_the_pass() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        graph (float[4] x) => (float[4] y)
        {
           a = Constant <value_string = "a"> ()
           y = Exp (x)
        }
    """
    graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(
        torch_ort.Unsupported, match=r"^pass fold_constants: Constant: 'a' holds no dense"
    ):
        _C.run_pass("fold_constants", graph)
