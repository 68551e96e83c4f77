"""The formulas that files and fused regions share, against eager PyTorch in float64.

onnx's reference evaluator and onnxruntime run the file; the region runs on every instruction set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx.checker
import onnx.reference
import onnxruntime
import pytest
import regions
import torch
import torch.nn.functional as F
from conversion import convert, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from regions import ISAS

from torch_ort import _C

OLDEST = 12  # an opset without ops for these operators, and with axes as attributes
# Relative to the largest result.
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-14, torch.float16: 2**-10}
INFINITY = float("inf")


@dataclasses.dataclass(frozen=True)
class Formula:
    """`call` takes rows, then `weights` vectors of as many numbers as a row has."""

    call: Callable[..., torch.Tensor]
    weights: int = 0
    # By what factor a rounding error of the row may grow in the result, for each row.
    growth: Callable[[torch.Tensor], torch.Tensor] = lambda rows: torch.ones(len(rows), 1)


def layer_norm(rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(rows, rows.shape[1:], *weights, eps=1e-3)


def growth_of_layer_norm(rows: torch.Tensor) -> torch.Tensor:
    """Rounding errors of the mean are relative to the largest number, then divided."""
    if rows.numel() == 0:
        return torch.ones(len(rows), 1)
    deviation = (rows.var(1, correction=0, keepdim=True) + 1e-3).sqrt()
    return 1 + rows.abs().amax(1, keepdim=True) / deviation


FORMULAS = {
    "softmax": Formula(lambda rows: rows.softmax(1)),
    "log-softmax": Formula(lambda rows: rows.log_softmax(1)),
    "layer norm": Formula(layer_norm, 2, growth_of_layer_norm),
    "layer norm without a bias": Formula(layer_norm, 1, growth_of_layer_norm),
    "layer norm without weights": Formula(layer_norm, 0, growth_of_layer_norm),
    "rsqrt": Formula(torch.rsqrt),
}


@st.composite
def all_rows(draw: st.DrawFn) -> torch.Tensor:
    """Draw rows in float64 whose numbers are exact in float16; some are not finite."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    rows = torch.randn(draw(st.integers(0, 5)), draw(st.integers(0, 70)), dtype=torch.float64)
    rows *= draw(st.sampled_from((1e-2, 1.0, 30.0)))
    rows += draw(st.sampled_from((0.0, -4.0, 60.0)))
    special = draw(st.sampled_from((None, None, 0.0, -INFINITY, INFINITY, float("nan"))))
    if special is not None:
        share = draw(st.sampled_from((0.05, 0.5, 1.0)))
        rows[torch.rand(rows.shape) < share] = special
    return rows.half().double()


def run_evaluator(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        (result,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    return result


def run_onnxruntime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (result,) = session.run(None, inputs)
    return result


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=regions.NAMES.get)
@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=12, deadline=None)
@given(rows=all_rows())
def test_file_and_region_agree_with_eager(
    name: str, dtype: torch.dtype, rows: torch.Tensor
) -> None:
    formula = FORMULAS[name]
    torch.manual_seed(0)
    weights = [torch.randn(rows.shape[1]).half().double() for _ in range(formula.weights)]
    want = formula.call(rows, *weights)
    inputs = [x.to(dtype) for x in (rows, *weights)]

    def check(where: str, got: torch.Tensor) -> None:
        assert got.dtype == dtype
        size = want.abs().nan_to_num(0, 0, 0).amax().clamp(min=1) if want.numel() else 1
        near = TOLERANCE[dtype] * size * formula.growth(rows).nan_to_num(1, 1, 1)
        got = got.double()
        is_close = (got - want).abs() <= near
        is_same = (got == want) | (got.isnan() & want.isnan())
        assert (is_close | is_same).all(), (where, got, want)

    file = convert(formula.call, *inputs, opset=OLDEST)
    assert _C.spell_out(file, OLDEST) == 1
    model = model_of(file)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    arrays = {name: x.numpy() for name, x in zip(file.input_names, inputs, strict=True)}
    for run in (run_evaluator, run_onnxruntime):
        check(run.__name__, torch.from_numpy(np.asarray(run(model, arrays))))

    region = convert(formula.call, *inputs)
    # PyTorch's kernels know what they give where there are no elements.
    assert _C.run_pass("expand_composites", region) == (1 if rows.numel() else 0)
    region = regions.fuse(region)
    given_by_name = dict(zip(region.input_names, inputs, strict=True))
    for isa in ISAS:
        (result,) = regions.run_by_name(region, given_by_name, isa).values()
        check(isa, result)
