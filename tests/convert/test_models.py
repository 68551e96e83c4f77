"""Whole models in inference: standard nodes only, eager's bits, onnxruntime's numbers."""

from __future__ import annotations

import pytest
import torch
from conversion import NEWEST, assert_onnx_agrees, convert, ops_of, run
from models import MODELS

from torch_ort import _C


def converted(
    name: str, opset: int = NEWEST, dynamic: bool = False
) -> tuple[_C.Graph, list[torch.Tensor], torch.Tensor]:
    """Give the graph of a model, its inputs (parameters last), and eager's result."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def function(given: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(state, values, strict=True)), (given,))

    inputs = [x, *state.values()]
    return convert(function, *inputs, opset=opset, dynamic=dynamic), inputs, model(x)


@pytest.mark.parametrize("name", MODELS)
def test_standard_nodes_alone(name: str) -> None:
    graph, inputs, want = converted(name)
    assert [op for op in ops_of(graph) if op.startswith("aten::")] == []
    (got,) = run(graph, inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert_onnx_agrees(graph, inputs)


@pytest.mark.parametrize("opset", [12, 14, 17, 20])
@pytest.mark.parametrize("name", MODELS)
def test_older_opsets(name: str, opset: int) -> None:
    graph, inputs, want = converted(name, opset)
    assert _C.required_opset(graph) <= opset
    (got,) = run(graph, inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["MLP", "encoder block", "causal language model"])
def test_symbolic_sizes(name: str) -> None:
    graph, inputs, want = converted(name, dynamic=True)
    (got,) = run(graph, inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
