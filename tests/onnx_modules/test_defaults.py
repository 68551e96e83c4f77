"""What files leave out, and loaded modules have to know."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import parser

import torch_ort
from tests.roads import ROADS

FUNCTION = """
    <ir_version: 10, opset_import: ["" : 20, "local" : 1]>
    g (float[n] x) => (float[n] y, float[n] z)
    { y = local.twice (x)  z = local.act <alpha: float = 0.25> (x) }
    <domain: "local", opset_import: ["" : 20]>
    act <alpha: float = 0.5> (a) => (b) { b = LeakyRelu <alpha: float = @alpha> (a) }
    <domain: "local", opset_import: ["" : 20, "local" : 1]>
    twice (a) => (c) { b = local.act (a)  c = local.act (b) }
"""
INTEGERS = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (int32[n, 3] x) => (int32[n] y, int32 z, int32[n] p)
    <int64[1] axes = {1}>
    {
      y = ReduceSum <keepdims: int = 0> (x, axes)
      z = ReduceSum <keepdims: int = 0> (x)
      p = ReduceProd <keepdims: int = 0> (x, axes)
    }
"""
POOL = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[n, 3, h, w] x) => (float[n, 3, u, v] y)
    { y = OPERATOR <kernel_shape: ints = [2, 2], strides: ints = [3, 3], ceil_mode: int = 1> (x) }
"""


def check(text: str, *inputs: torch.Tensor, road: str = "") -> None:
    model = parser.parse_model(text)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    module = torch_ort.load_onnx(model)
    call = ROADS[road](module) if road else module
    for x in inputs:
        got = call(x)
        want = session.run(None, {"x": x.numpy()})
        for ours, theirs in zip(got if isinstance(got, tuple) else [got], want, strict=True):
            torch.testing.assert_close(ours, torch.from_numpy(np.asarray(theirs)))


def test_defaults_of_functions() -> None:
    check(FUNCTION, torch.tensor([-1.0, 2.0]))


@pytest.mark.parametrize("road", ["", *ROADS])
def test_sums_of_integers_are_of_their_type(road: str) -> None:
    check(INTEGERS, torch.arange(12, dtype=torch.int32).view(4, 3), road=road)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("road", ["", *ROADS])
def test_no_window_begins_behind_an_image(road: str, operator: str) -> None:
    images = [torch.randn(2, 3, height, 7) for height in (6, 8, 7, 9)]
    check(POOL.replace("OPERATOR", operator), *images, road=road)
