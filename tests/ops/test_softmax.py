"""Softmax and its logarithm."""

from __future__ import annotations

import pytest
import torch
from driver import Case, check, floats, run, with_half

import torch_ort

CASES = [
    Case(op, [floats(2, 3, 4)], lambda x, f=eager, a=axis: f(x, a), {"axis": axis})
    for op, eager in [("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)]
    for axis in (0, 1, -1)
] + [
    Case("Softmax", [floats(2, 5)], lambda x: x.softmax(-1), dims={0: ["N", "T"]}),
    Case("LogSoftmax", [floats(2, 1)], lambda x: x.log_softmax(-1)),
    Case("Softmax", [floats(0, 5)], lambda x: x.softmax(-1), note="empty"),
    Case("Softmax", [floats(5)], lambda x: x.softmax(0)),
    Case("Softmax", [floats(2, 5).double()], lambda x: x.softmax(-1)),
    Case("Softmax", [torch.tensor([[0.0, -torch.inf]])], lambda x: x.softmax(-1)),
]


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


def test_wrong_axis_is_an_error() -> None:
    with pytest.raises(torch_ort.UserError, match="Softmax: axis out of range: got 2"):
        run(Case("Softmax", [floats(2, 3)], None, {"axis": 2}))
