"""What the compiler tells of its work: report, dumps, profiler."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import torch_ort
from tests.injection import into_reading
from torch_ort.fallback import FallbackWarning
from torch_ort.reports.report import COMPILE_STAGES

pytestmark = pytest.mark.ort_only


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def test_report():
    model = block()
    report = torch_ort.explain(model, torch.randn(4, 6))
    (graph,) = report.graphs
    assert graph.is_training
    assert graph.nodes["Gemm"] == 2
    assert graph.nodes["com.microsoft.YieldOp"] == 1
    assert graph.fused["aten::gelu_backward"] == 1
    assert graph.nodes["torch_ort.Region"] == 2
    assert not graph.aten
    assert graph.plan["peak_bytes"] >= graph.plan["context_bytes"] > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    text = str(report)
    for words in (
        "graph 0 (training)",
        "Gemm 2",
        "fallbacks, where the engine failed and eager PyTorch ran instead: 0\n",
        "places that Dynamo leaves to eager PyTorch: 0\n",
        "fused regions: 2, in place of",
        "aten::gelu_backward 1",
        "planned memory: ",
        "compile time:",
    ):
        assert words in text


def test_report_of_a_model_that_is_compiled_already():
    model = block()
    torch.compile(model, backend="ort")(torch.randn(4, 6))
    assert len(torch_ort.explain(model, torch.randn(4, 6)).graphs) == 1


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_compile_time_by_stage(grad):
    with torch.set_grad_enabled(grad):
        report = torch_ort.explain(block(), torch.randn(4, 6))
    (graph,) = report.graphs
    recorded = [name for name in COMPILE_STAGES if name != "aot"]
    assert set(graph.seconds) == set(recorded)
    assert all(spent > 0 for spent in graph.seconds.values())
    assert sum(graph.seconds.values()) < report.first_step_seconds
    number = r"\d+\.\d ms"
    stages = ", ".join(f"{name} {number}" for name in recorded)
    assert re.search(f"compile time: {stages}$", str(report), re.MULTILINE)


def test_compile_time_of_a_graph_that_is_compiled_already():
    x = torch.randn(4, 6)
    torch.compile(block(), backend="ort")(x)
    (graph,) = torch_ort.explain(block(), x).graphs
    assert set(graph.seconds) == set(COMPILE_STAGES) - {"plan", "aot"}


def test_bytes_that_regions_move():
    model = nn.Sequential(nn.GELU(), nn.Tanh())
    with torch.no_grad():
        report = torch_ort.explain(model, torch.randn(4, 6))
    (graph,) = report.graphs
    one = 4 * 6 * 4  # bytes of a tensor
    # Two operators read and write one tensor each; between them nothing moves in the region.
    assert (graph.bytes_before, graph.bytes_after) == (4 * one, 2 * one)
    words = (
        "fused regions: 1, in place of 2 nodes: .*\n"
        "  bytes read and written: 384 B by the operators that the regions"
    )
    assert re.search(f"{words} replace, 192 B by the regions", str(report))


def test_bytes_that_regions_move_in_training():
    (graph,) = torch_ort.explain(block(), torch.randn(4, 6)).graphs
    full, row, column = 4 * 4 * 8, 4 * 4, 4 * 8
    gelu = 2 * full + 3 * full  # forward and backward
    norm = full + 2 * column + full + 2 * row
    norm_backward = 2 * full + 2 * row + 2 * column + full + 2 * column
    bias = full + column  # its gradient is a sum
    assert graph.bytes_before == gelu + norm + norm_backward + bias
    assert graph.bytes_after < graph.bytes_before


def test_bytes_that_regions_move_with_dynamic_sizes():
    model = nn.Sequential(nn.GELU(), nn.Tanh())
    x = torch.randn(4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        (graph,) = torch_ort.explain(model, x).graphs
    assert (graph.bytes_before, graph.bytes_after) == (4 * 96, 2 * 96)


def test_without_regions_no_bytes_are_compared():
    report = torch_ort.explain(block(), torch.randn(4, 6), options={"disable": "fuse_regions"})
    text = str(report)
    assert "fused regions: none" in text
    assert "bytes read and written" not in text
    assert report.counters["graphs_compiled"] == torch_ort.counters()["graphs_compiled"]


class Branches(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        if y.sum() > 0:  # here
            y = y * 2
        return y + 1


def test_a_graph_break_is_listed_with_its_line_and_reason():
    report = torch_ort.explain(Branches(), torch.ones(3, requires_grad=True))
    assert len(report.graphs) == 2
    (found,) = report.breaks
    first = Branches.forward.__code__.co_firstlineno
    assert (found.line.path, found.line.number) == (__file__, first + 2)
    assert str(report).splitlines()[2:4] == [
        "places that Dynamo leaves to eager PyTorch: 1",
        f"  test_explain.py:{first + 2}: a part of 'forward' (test_explain.py:{first}): "
        "generic_jump TensorVariable(): the program branches on the value of a tensor",
    ]


@pytest.mark.hands_over("captures are made to fail")
def test_a_fallback_is_listed_with_its_line_and_reason(monkeypatch):
    into_reading(monkeypatch, "tan", "refused by a test")
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def function(x):
        return torch.tan(x).exp()

    line = function.__code__.co_firstlineno + 1
    with pytest.warns(FallbackWarning, match="refused by a test"):
        report = torch_ort.explain(function, torch.ones(3))
    assert report.graphs == []
    (found,) = report.fallbacks
    assert (found.stage, found.line.path, found.line.number) == ("convert", __file__, line)
    assert str(report).splitlines()[:3] == [
        f"torch_ort: no graph was captured; compilation and first step took "
        f"{report.first_step_seconds:.2f} s",
        "fallbacks, where the engine failed and eager PyTorch ran instead: 1",
        f"  test_explain.py:{line}: stage 'convert': refused by a test "
        f"(aten.tan.default, test_explain.py:{line})",
    ]


def test_report_of_an_inference_graph():
    with torch.no_grad():
        (graph,) = torch_ort.explain(block(), torch.randn(4, 6)).graphs
    assert not graph.is_training
    assert not graph.aten


def test_dumps(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DUMP", "ir,passes,steps")
    monkeypatch.setenv("TORCH_ORT_DUMP_DIR", str(tmp_path / "dumps"))
    torch.compile(block(), backend="ort")(torch.randn(4, 6))
    texts = {
        path.name.partition("_")[2]: path.read_text() for path in (tmp_path / "dumps").iterdir()
    }
    assert set(texts) == {"captured.onnxtxt", "optimized.onnxtxt", "steps.txt"}
    assert "torch_ort.Region" in texts["steps.txt"]
    assert "LayerNormalization" in texts["captured.onnxtxt"]


def test_steps_are_dumped_for_each_of_two_equal_graphs(tmp_path):
    options = {"dump": "steps", "dump_dir": str(tmp_path)}
    reports = [torch_ort.explain(block(), torch.randn(4, 6), options=options) for _ in range(2)]
    assert [report.counters["graphs_compiled"] for report in reports] == [1, 0]
    first, second = (path.read_text() for path in tmp_path.iterdir())
    assert first == second


def test_the_plan_is_dumped_after_the_first_run(tmp_path):
    model = block()
    options = {"dump": "plan", "dump_dir": str(tmp_path), "disable": "fuse_regions"}
    compiled = torch.compile(model, backend="ort", options=options)
    loss = compiled(torch.randn(4, 6)).sum()
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"\d+_plan\.txt", path.name)
    heads, *lines = [line.split(maxsplit=7) for line in path.read_text().splitlines()]
    assert heads == ["name", "kind", "area", "offset", "bytes", "first", "last", "memory of"]
    rows = {line[0]: dict(zip(heads, line, strict=False)) for line in lines}
    assert [int(line[5]) for line in lines] == sorted(int(line[5]) for line in lines)
    product = rows["addmm"]
    assert (product["kind"], product["bytes"]) == ("planned", str(4 * 8 * 4))
    assert product["area"] == "context"
    assert int(product["last"]) > int(rows["tangents_1"]["first"])  # its gradient reads it
    assert {row["kind"] for row in rows.values()} >= {"input", "planned", "delivered", "output"}
    places = {(row["area"] == "-", row["offset"] == "-") for row in rows.values()}
    assert places == {(True, True), (False, False)}

    path.unlink()
    loss.backward()
    compiled(torch.randn(4, 6))
    assert not list(tmp_path.iterdir())


def test_profiler_shows_each_step_by_its_node():
    compiled = torch.compile(block(), backend="ort")
    compiled(torch.randn(4, 6)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(torch.randn(4, 6)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"torch_ort::run_forward", "torch_ort::run_backward", "addmm", "mm_1"} <= names
    assert any(name.startswith("gelu_to_native_layer_norm") for name in names)


def test_the_plan_is_told_though_logits_have_gradients_of_their_own() -> None:
    """The first call expects that only the loss has one; explain() differentiates all outputs."""

    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 300)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.layer(nn.functional.gelu(x))
            return nn.functional.cross_entropy(logits, y), logits

    (graph,) = torch_ort.explain(Classes(), torch.randn(32, 64), torch.arange(32)).graphs
    assert graph.plan["peak_bytes"] > 0
    assert graph.bytes_before > graph.bytes_after > 0
