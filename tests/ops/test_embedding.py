"""Ops that read and write by index."""

from __future__ import annotations

import pytest
import torch
from driver import Case, check, floats, ints, run, with_half

import torch_ort

IDS = torch.tensor([[2, 0, 2], [1, 1, 0]])
INDEX = torch.tensor([[0, 1, 1], [1, 0, 0]])

CASES = [
    Case("Gather", [floats(3, 4), IDS], lambda w, i: torch.nn.functional.embedding(i, w),
        dims={1: ["N", "T"]}),
    Case("Gather", [floats(3, 4), IDS.int()], lambda w, i: w[i], note="int32"),
    Case("Gather", [floats(3, 4), ints()], lambda w, i: w[i], note="empty"),
    Case("Gather", [floats(3, 4), torch.tensor(2)], lambda w, i: w[i], note="not known"),
    Case("Gather", [floats(3, 4), torch.tensor(2)], lambda x, _: x[2], known=[1]),
    Case("Gather", [floats(3, 4), torch.tensor(-1)], lambda x, _: x[:, -1], {"axis": 1}, known=[1],
        dims={0: ["N", 4]}),
    Case("Gather", [floats(3, 4), ints(3, 0)], lambda x, i: x[:, i], {"axis": -1}),
    Case("Gather", [floats(5), ints(3, 0)], lambda x, i: x[i]),
    Case("Gather", [floats(3, 4, 2), IDS], lambda x, i: x[:, i], {"axis": 1}),
    Case("Gather", [floats(3, 4, 2), torch.tensor(3)], lambda x, i: x[:, i], {"axis": 1}),
    Case("GatherElements", [floats(2, 3), INDEX], lambda x, i: x.gather(1, i), {"axis": 1},
        dims={0: ["N", 3], 1: ["N", 3]}),
    Case("GatherElements", [floats(2, 3), INDEX.int()], lambda x, i: x.gather(0, i.long())),
    Case("ScatterElements", [torch.zeros(2, 3), INDEX[:, :1], floats(2, 1)], lambda x, i,
        u: x.scatter(1, i, u), {"axis": 1}),
    *(Case("ScatterElements", [floats(2, 3), INDEX, floats(2, 3)], lambda x, i, u,
     r=reduce: x.scatter_reduce(0, i, u, r), {"axis": 0, "reduction": name}, opset=opset) for name,
     reduce,
     opset in [("add", "sum", 16), ("mul", "prod", 16), ("max", "amax", 18), ("min", "amin", 18)]),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


def test_indices_below_those_that_count_from_the_end() -> None:
    with pytest.raises(IndexError):
        run(Case("Gather", [floats(3, 4), ints(0, -4)], None))


def test_unknown_reduction_is_an_error() -> None:
    inputs = [floats(2, 3), INDEX, floats(2, 3)]
    case = Case("ScatterElements", inputs, None, {"reduction": "mean"}, opset=18)
    with pytest.raises(torch_ort.UserError, match="reduction: got 'mean'"):
        run(case)
