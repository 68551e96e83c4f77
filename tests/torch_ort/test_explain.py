"""What the compiler tells of its work: report, files, profiler."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import _C

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
    assert graph.aten["aten::gelu_backward"] == 1
    assert graph.plan["peak_bytes"] >= graph.plan["context_bytes"] > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    text = str(report)
    for words in (
        "graph 0 (training)",
        "Gemm 2",
        "aten::gelu_backward 1",
        "memory: peak",
        "compile time:",
    ):
        assert words in text


def test_report_of_a_model_that_is_compiled_already():
    model = block()
    torch.compile(model, backend="ort")(torch.randn(4, 6))
    assert len(torch_ort.explain(model, torch.randn(4, 6)).graphs) == 1


def test_report_of_an_inference_graph():
    with torch.no_grad():
        (graph,) = torch_ort.explain(block(), torch.randn(4, 6)).graphs
    assert not graph.is_training
    assert not graph.aten


def test_files(tmp_path):
    prefix = str(tmp_path / "step")
    model = block()
    compiled = torch.compile(
        model, backend="ort", options={"save_onnx": True, "onnx_prefix": prefix}
    )
    compiled(torch.randn(4, 6)).sum().backward()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert names[0].endswith("_captured.onnx")
    for path in tmp_path.iterdir():
        written = onnx.load(path)
        onnx.checker.check_model(written, full_check=True)
        assert "YieldOp" in [node.op_type for node in written.graph.node]


def test_a_written_graph_runs_again(tmp_path):
    prefix = str(tmp_path / "step")
    model = block()
    compiled = torch.compile(
        model, backend="ort", options={"save_onnx": True, "onnx_prefix": prefix}
    )
    x = torch.randn(4, 6)
    with torch.no_grad():
        expected = compiled(x)
    (path,) = tmp_path.glob("*_optimized.onnx")
    graph = _C.Graph.from_onnx(path.read_bytes())
    # Inputs stand in the order of their first use: weight, bias, then the batch, and so on.
    tensors = [*(p.detach() for p in model[0].parameters()), x]
    tensors += [p.detach() for layer in (model[2], model[3]) for p in layer.parameters()]
    (result,) = _C.run(graph, dict(zip(graph.input_names, tensors, strict=True))).values()
    torch.testing.assert_close(result, expected)


def test_files_that_cannot_be_written(tmp_path):
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "nowhere" / "step")}
    with pytest.raises(Exception, match=r"save_onnx: cannot write .*nowhere"):
        torch.compile(block(), backend="ort", options=options)(torch.randn(4, 6))


def test_dumps(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DUMP", "ir,passes,steps")
    monkeypatch.setenv("TORCH_ORT_DUMP_DIR", str(tmp_path / "dumps"))
    torch.compile(block(), backend="ort")(torch.randn(4, 6))
    texts = {
        path.name.partition("_")[2]: path.read_text() for path in (tmp_path / "dumps").iterdir()
    }
    assert set(texts) == {"captured.onnxtxt", "optimized.onnxtxt", "steps.txt"}
    assert "aten::native_layer_norm" in texts["steps.txt"]
    assert "LayerNormalization" in texts["captured.onnxtxt"]


def test_profiler_shows_each_step_by_its_node():
    compiled = torch.compile(block(), backend="ort")
    compiled(torch.randn(4, 6)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(torch.randn(4, 6)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"torch_ort::run_forward", "torch_ort::run_backward", "gelu", "gelu_backward"} <= names
