"""Rows of softmax."""

from __future__ import annotations

import torch
from conversion import NEWEST, check, floats

X = floats(2, 3, 4)


def test_softmax() -> None:
    for axis in (0, 1, -1):
        ops = {12: ["aten::_softmax"], 14: ["Softmax"]}
        check(lambda x, a=axis: x.softmax(a), X, ops=ops)
        ops = {12: ["aten::_log_softmax"], 14: ["LogSoftmax"]}
        check(lambda x, a=axis: x.log_softmax(a), X, ops=ops)
    check(lambda x: x.softmax(-1), X, ops=["Softmax"], dynamic=True, pins=(NEWEST,))
    check(lambda x: x.softmax(-1), X.bfloat16(), ops=["Softmax"], pins=(14, 20))
    check(lambda x: x.softmax(0), torch.tensor(1.0), ops=["aten::_softmax"], pins=(20,))
