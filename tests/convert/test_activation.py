"""Rows of activation functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from conversion import NEWEST, check, floats

X = floats(4, 3) * 3

ACTIVATIONS = [
    (F.gelu, {12: ["aten::gelu"], 20: ["Gelu"]}),
    (lambda x: F.gelu(x, approximate="tanh"), {12: ["aten::gelu"], 20: ["Gelu"]}),
    (F.silu, {12: ["aten::silu"], NEWEST: ["Swish"]}),
    (lambda x: F.leaky_relu(x, 0.1), ["LeakyRelu"]),
    (F.elu, ["Elu"]),
    (lambda x: F.elu(x, 0.5), ["Elu"]),
    (F.selu, ["Selu"]),
    (lambda x: F.celu(x, 0.5), ["aten::celu"]),
    (F.softplus, ["Softplus"]),
    (lambda x: F.softplus(x, 2.0), ["aten::softplus"]),
    (F.hardswish, {12: ["aten::hardswish"], 14: ["HardSwish"]}),
    (F.hardsigmoid, ["HardSigmoid"]),
    (F.mish, {12: ["aten::mish"], 20: ["Mish"]}),
]


@pytest.mark.parametrize(("function", "ops"), ACTIVATIONS, ids=range(len(ACTIVATIONS)))
def test_activation(function: Callable, ops: Sequence[str] | dict) -> None:
    check(function, X, ops=ops)
    last = ops[max(ops)] if isinstance(ops, dict) else ops
    check(function, X, ops=last, dynamic=True, pins=(NEWEST,))
    check(function, X.bfloat16(), ops=last, pins=(NEWEST,))


def test_float64_softplus_is_cut_off_in_eager_alone() -> None:
    check(F.softplus, X.double(), ops=["aten::softplus"], pins=(20,))


def test_prelu() -> None:
    ops = ["Reshape", "PRelu"]
    check(lambda x, w: F.prelu(x, w), X, torch.tensor([0.1, 0.2, 0.3]), ops=ops)
    check(lambda x, w: F.prelu(x, w), floats(2, 3, 4, 4), torch.tensor([0.1, 0.2, 0.3]), ops=ops)
