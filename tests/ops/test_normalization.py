"""Normalization of rows, groups and batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from driver import Case, assert_inferred, check, floats, one_node_model, read, run, with_half

import torch_ort

X, SCALE, BIAS = floats(2, 3, 8), floats(8), floats(8) * 0.5
IMAGES, CHANNELS = floats(2, 4, 3, 5), floats(4)
MEAN, VARIANCE = floats(4) * 0.1, floats(4).abs() + 0.5


def layer_norm(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, parameters[0].shape, *parameters)


def rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, scale.shape, scale, 1e-5)


CASES = [
    Case("LayerNormalization", [X, SCALE, BIAS], layer_norm, dims={0: ["N", "T", 8]}),
    Case("LayerNormalization", [X, SCALE], layer_norm),
    Case("LayerNormalization", [X, floats(3, 8), floats(3, 8)], layer_norm, {"axis": 1},
        dims={0: ["N", 3, 8]}),
    Case("LayerNormalization", [X, SCALE, BIAS], lambda x, w, b: F.layer_norm(x, (8, ), w, b, 1e-3),
        {"epsilon": 1e-3}),
    Case("LayerNormalization", [floats(0, 8), SCALE, BIAS], layer_norm, note="empty"),
    Case("LayerNormalization", [X, SCALE, BIAS], lambda x, w,
        b: torch.native_layer_norm(x, (8, ), w, b, 1e-5), dims={0: ["N", "T", 8]}, half=False,
        note="statistics"),
    Case("LayerNormalization", [X, floats(1), floats(1)], lambda x, w,
        b: F.layer_norm(x, (8, ), w.expand(8), b.expand(8)), note="stretched"),
    Case("RMSNormalization", [X, SCALE], rms_norm, dims={0: ["N", "T", 8]}),
    Case("RMSNormalization", [X, floats(3, 8)], rms_norm, {"axis": 1}),
    Case("BatchNormalization", [IMAGES, CHANNELS, CHANNELS.flip(0), MEAN, VARIANCE], lambda x, w, b,
        m, v: F.batch_norm(x, m, v, w, b), dims={0: ["N", 4, "H", 5]}, opset=15),
    Case("BatchNormalization", [floats(3, 4), CHANNELS, CHANNELS, MEAN, VARIANCE], lambda x, w, b,
        m, v: F.batch_norm(x, m, v, w, b, eps=1e-3), {"epsilon": 1e-3}, opset=15),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm(dtype: torch.dtype) -> None:
    # Apart: onnx has no rule for the type of its result.
    inputs = [x.to(dtype) for x in (IMAGES, CHANNELS, CHANNELS.flip(0))]
    case = Case("GroupNormalization", inputs, None, {"num_groups": 2}, dims={0: ["N", 4, "H", 5]})
    (got,) = run(case)
    assert torch.equal(got, F.group_norm(inputs[0], 2, *inputs[1:]))
    assert_inferred(read(one_node_model(case, 1, symbolic=True)), case, [got])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("LayerNormalization", [X, SCALE], None, {"stash_type": 10}), "stash_type: got 10"),
        (
            Case(
                "BatchNormalization",
                [IMAGES, CHANNELS, CHANNELS, MEAN, VARIANCE],
                None,
                {"training_mode": 1},
                opset=14,
            ),
            "BatchNormalization: training_mode",
        ),
    ],
)
def test_form_without_a_kernel_is_refused(case: Case, message: str) -> None:
    with pytest.raises(torch_ort.Unsupported, match=message):
        run(case)


def test_missing_number_of_groups_is_an_error() -> None:
    words = "GroupNormalization: attributes of node 'y0': got too few, want 'num_groups'"
    with pytest.raises(torch_ort.UserError, match=words):
        run(Case("GroupNormalization", [IMAGES, CHANNELS, CHANNELS], None))
