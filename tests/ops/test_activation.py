"""Activation functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from driver import Case, check, floats, run, with_half

import torch_ort

X = torch.tensor([[-20.0, -3.0, -1.0, -0.5, 0.0], [0.25, 1.0, 3.0, 6.0, 30.0]])

CASES = [
    Case("Gelu", [X], F.gelu, dims={0: ["N", 5]}),
    Case("Gelu", [X], lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"}),
    Case("Gelu", [floats(0, 3)], F.gelu, note="empty"),
    Case("Swish", [X], F.silu),
    Case("Swish", [X], lambda x: x * torch.sigmoid(x * 0.5), {"alpha": 0.5}),
    Case("LeakyRelu", [X], lambda x: F.leaky_relu(x, 0.01)),
    Case("LeakyRelu", [X], lambda x: F.leaky_relu(x, 0.25), {"alpha": 0.25}),
    Case("Elu", [X], F.elu),
    Case("Elu", [X], lambda x: F.elu(x, 0.5), {"alpha": 0.5}),
    Case("Selu", [X], F.selu),
    Case("Softplus", [X], F.softplus, reference=False),
    Case("Softsign", [X], F.softsign, dims={0: ["N", 5]}),
    Case("HardSwish", [X], F.hardswish),
    Case("HardSigmoid", [X], F.hardsigmoid, {"alpha": 1 / 6, "beta": 0.5}),
    Case("HardSigmoid", [X], lambda x: (x * 0.25 + 0.5).clamp(0, 1), {"alpha": 0.25}),
    Case("Mish", [X], F.mish),
    Case("PRelu", [X, torch.tensor([0.25])], F.prelu),
    Case("PRelu", [floats(2, 3, 4), floats(3, 1)], lambda x, w: F.prelu(x, w.view(3))),
]


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


def test_unknown_approximation_is_an_error() -> None:
    with pytest.raises(torch_ort.UserError, match="approximate: got 'cubic'"):
        run(Case("Gelu", [X], None, {"approximate": "cubic"}))
