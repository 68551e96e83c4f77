"""What the compiler tells of its work: report, dumps, profiler."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import torch_ort
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
        "regions: 2 with",
        "aten::gelu_backward 1",
        "memory: peak",
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
    words = "regions: 1 with 2 nodes: .*\n  bytes moved: 384 B by the operators that the regions"
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
    assert "bytes moved" not in str(report)
    assert report.counters["graphs_compiled"] == torch_ort.counters()["graphs_compiled"]


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


def test_roofline() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.BatchNorm1d(256), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    report = torch_ort.explain(model.eval(), x, roofline=True)
    roofline = report.roofline
    assert roofline is not None
    # Two products of 128 x 64 x 256, and two more for each one in backward; not for the input.
    assert roofline.flops == 2 * 128 * 64 * 256 * 5
    parameters = sum(p.numel() for p in model.parameters())
    saved = report.graphs[0].plan["saved_bytes"]
    assert roofline.memory_bytes == 4 * (2 * parameters + x.numel()) + saved
    assert roofline.seconds > 0
    assert roofline.ratio == pytest.approx(roofline.step_seconds / roofline.seconds)
    assert re.search(r"roofline: a step took [\d.]+ ms, [\d.]+ of the least: ", str(report))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_roofline_without_gradients() -> None:
    model, x = nn.Linear(64, 32), torch.randn(16, 64)
    with torch.no_grad():
        report = torch_ort.explain(model, x, roofline=True)
    assert report.roofline is not None
    assert report.roofline.flops == 2 * 16 * 64 * 32
    assert report.roofline.memory_bytes == 4 * (64 * 32 + 32 + 16 * 64)


def test_steps_for_the_roofline_leave_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    x = torch.randn(4, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    for roofline in (False, True):
        model.load_state_dict(state)
        torch.manual_seed(1)
        torch_ort.explain(model, x, roofline=roofline)
        results.append((model[1].running_mean.clone(), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
