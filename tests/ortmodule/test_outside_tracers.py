"""An ORTModule in somebody else's trace is the module itself."""

from __future__ import annotations

import io
import logging

import onnx
import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import ORTModule

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*legacy TorchScript:DeprecationWarning"),
]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "new"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_torch_jit_trace(is_captured, grad):
    module, x = network(), torch.randn(5, 6)
    wrapped = ORTModule(module)
    with torch.set_grad_enabled(grad):
        if is_captured:
            wrapped(x)
        traced = torch.jit.trace(wrapped, x)
    other = torch.randn(3, 6)
    torch.testing.assert_close(traced(other), module(other))
    assert "aten::gelu" in str(traced.inlined_graph)
    torch.testing.assert_close(wrapped(other), module(other))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "new"])
def test_the_exporter_by_torchscript(is_captured):
    module, x = network(), torch.randn(5, 6)
    wrapped = ORTModule(module)
    if is_captured:
        wrapped(x)
    file = io.BytesIO()
    torch.onnx.export(wrapped, (x,), file, dynamo=False)
    ops = [node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node]
    assert ops.count("Gemm") == 2


@pytest.mark.hands_over("PyTorch words the error")
def test_a_wrong_shape_is_eagers_error_and_nothing_else(caplog, capfd, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    wrapped = ORTModule(network())
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError) as caught:
        wrapped(torch.randn(5, 7))
    assert str(caught.value) == "mat1 and mat2 shapes cannot be multiplied (5x7 and 6x8)"
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
