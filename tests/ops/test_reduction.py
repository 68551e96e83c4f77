"""Ops that reduce along axes."""

from __future__ import annotations

import pytest
import torch
from driver import Case, check, floats, ints, run, with_half

import torch_ort

X = floats(2, 3, 4)
REDUCTIONS = [
    ("ReduceSum", torch.sum, torch.sum),
    ("ReduceMean", torch.mean, torch.mean),
    ("ReduceMax", torch.amax, torch.max),
    ("ReduceMin", torch.amin, torch.min),
    ("ReduceLogSumExp", torch.logsumexp, None),
    ("ReduceL1", lambda x, d, keepdim: torch.linalg.vector_norm(x, 1, d, keepdim), None),
    ("ReduceL2", lambda x, d, keepdim: torch.linalg.vector_norm(x, 2, d, keepdim), None),
]

CASES = [
    *(Case(op, [X, ints(*axes)], lambda x, _, f=eager, a=axes, k=keeps: f(x, a, keepdim=bool(k)),
     {"keepdims": keeps}, known=[1], dims={0: ["N", 3, "T"]}, opset=18) for op, eager,
     _ in REDUCTIONS for axes in ([1], [0, -1]) for keeps in (0, 1)),
    *(Case(op, [X], lambda x, f=eager: f(x, [0, 2], keepdim=True), {"axes": [0, -1]}, dims={0: ["N",
     3, "T"]}, half=False) for op, eager, _ in REDUCTIONS),
    *(Case(op, [X], total, {"keepdims": 0}, dims={0: ["N", 3, "T"]}, opset=13) for op, _,
     total in REDUCTIONS if total is not None),
    *(Case(op, [X], lambda x, f=eager: f(x, [0, 1, 2], keepdim=True), opset=18, note="all") for op,
     eager, _ in REDUCTIONS),
    *(Case(op, [torch.tensor(-2.0)], total, {"keepdims": 0}, opset=13) for op, _,
     total in REDUCTIONS if total is not None),
    Case("ReduceL2", [torch.tensor(-2.0)], torch.abs, {"keepdims": 0}, opset=18),
    Case("ReduceSum", [floats(0, 3), ints(0)], lambda x, _: x.sum([0], True), known=[1], opset=13),
    Case("ReduceSum", [ints(1, 2, 3), ints(0)], lambda x, _: x.sum(0), {"keepdims": 0}, [1],
        opset=13),
    Case("ReduceMax", [ints(1, 5, 3)], torch.max, {"keepdims": 0}, opset=18),
    Case("ReduceSum", [X], torch.clone, {"noop_with_empty_axes": 1}, opset=13),
    Case("ReduceProd", [X], torch.prod, {"keepdims": 0}, opset=13),
    Case("ReduceProd", [X, ints(0, 2)], lambda x, _: x.prod(2, keepdim=True).prod(0, keepdim=True),
        known=[1], dims={0: ["N", 3, 4]}, opset=18),
    *(Case(op, [X], lambda x, f=eager, a=axis, k=keeps: f(x, a, bool(k)), {"axis": axis,
     "keepdims": keeps}, dims={0: ["N", "T", 4]}) for op,
     eager in [("ArgMax", torch.argmax), ("ArgMin", torch.argmin)] for axis,
     keeps in [(0, 1), (-1, 0)]),
    Case("ArgMax", [torch.ones(2, 3)], lambda x: x.argmax(1, True), {"axis": 1}, note="ties"),
    Case("CumSum", [X, torch.tensor(1)], lambda x, _: x.cumsum(1), known=[1],
        dims={0: ["N", 3, 4]}),
    Case("CumSum", [ints(1, 2, 3), torch.tensor(-1)], lambda x, _: x.cumsum(0), known=[1]),
    Case("CumSum", [ints(1, 2, 3).int(), torch.tensor(0)],
        lambda x, _: x.cumsum(0, dtype=torch.int32), known=[1], note="int32"),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("ArgMax", [X], None, {"select_last_index": 1}), "ArgMax: select_last_index"),
        (Case("CumSum", [X, ints(0)], None, {"reverse": 1}, known=[1]), "CumSum: reverse: got 1"),
        (Case("ReduceSum", [X, ints(0)], None, opset=13), "ReduceSum|depends on data"),
    ],
)
def test_form_without_a_kernel_is_refused(case: Case, message: str) -> None:
    with pytest.raises(torch_ort.Unsupported, match=message):
        run(case)


def test_wrong_axis_is_an_error() -> None:
    with pytest.raises(torch_ort.UserError, match="ReduceSum: axis out of range: got 3"):
        run(Case("ReduceSum", [X, ints(3)], None, known=[1], opset=13))
