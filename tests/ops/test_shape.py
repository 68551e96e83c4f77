"""Ops that view, join and pad."""

from __future__ import annotations

import pytest
import torch
from driver import Case, check, floats, ints, run, with_half

import torch_ort

END = 2**63 - 1


def k(*values: int) -> torch.Tensor:
    return ints(*values)


CASES = [
    Case("Reshape", [floats(4, 6), k(3, 8)], lambda x, _: x.reshape(3, 8), known=[1]),
    Case("Reshape", [floats(4, 6), k(-1, 3)], lambda x, _: x.reshape(-1, 3), known=[1],
        dims={0: ["N", 6]}),
    Case("Reshape", [floats(4, 6), k(0, 2, -1)], lambda x, _: x.reshape(4, 2, 3), known=[1],
        dims={0: ["N", 6]}),
    Case("Reshape", [floats(1), k()], lambda x, _: x.reshape(()), known=[1]),
    Case("Reshape", [floats(0, 6), k(6, -1)], lambda x, _: x.reshape(6, 0), known=[1]),
    Case("Reshape", [floats(0, 6), k(3, 0)], lambda x, _: x.reshape(3, 0), {"allowzero": 1},
        known=[1], opset=14),
    Case("Reshape", [floats(4, 6).t(), k(-1)], lambda x, _: x.reshape(-1), known=[1],
        note="strided"),
    Case("Flatten", [floats(2, 3, 4)], lambda x: x.reshape(2, 12), dims={0: ["N", 3, 4]}),
    Case("Flatten", [floats(2, 3, 4)], lambda x: x.reshape(1, 24), {"axis": 0}),
    Case("Flatten", [floats(2, 3, 4)], lambda x: x.reshape(6, 4), {"axis": -1}),
    Case("Flatten", [floats(2, 3, 4)], lambda x: x.reshape(24, 1), {"axis": 3}),
    Case("Transpose", [floats(2, 3, 4)], lambda x: x.permute(2, 1, 0), dims={0: ["N", 3, "M"]}),
    Case("Transpose", [floats(2, 3, 4)], lambda x: x.permute(0, 2, 1), {"perm": [0, 2, 1]}),
    Case("Transpose", [floats(0, 3)], lambda x: x.t()),
    Case("Expand", [floats(3, 1), k(2, 3, 4)], lambda x, _: x.expand(2, 3, 4), known=[1]),
    Case("Expand", [floats(3, 1), k(1, 4)], lambda x, _: x.expand(3, 4), known=[1],
        dims={0: ["N", 1]}),
    Case("Expand", [floats(3, 4), k(4)], lambda x, _: x.expand(3, 4), known=[1]),
    Case("Expand", [floats(1), k(0)], lambda x, _: x.expand(0), known=[1], note="empty"),
    Case("Slice", [floats(5, 6), k(1), k(4)], lambda x, *_: x[1:4], known=[1, 2]),
    Case("Slice", [floats(5, 6), k(1, -3), k(END, -1), k(0, -1)], lambda x, *_: x[1:, -3:-1],
        known=[1, 2, 3], dims={0: ["N", "M"]}),
    Case("Slice", [floats(9), k(1), k(100), k(0), k(3)], lambda x, *_: x[1:100:3],
        known=[1, 2, 3, 4], dims={0: ["N"]}),
    Case("Slice", [floats(5), k(4), k(2)], lambda x, *_: x[4:2], known=[1, 2], note="empty"),
    Case("Slice", [floats(7, 2), k(-1), k(-END), k(0), k(-2)], lambda x, *_: x.flip(0)[::2],
        known=[1, 2, 3, 4]),
    Case("Slice", [floats(7, 2), k(-1), k(-END), k(0), k(-1)], lambda x, *_: x.flip(0),
        known=[1, 2, 3, 4], dims={0: ["N", 2]}),
    Case("Slice", [floats(7), k(5), k(1), k(0), k(-3)], lambda x, *_: x[[5, 2]],
        known=[1, 2, 3, 4]),
    Case("Unsqueeze", [floats(3, 4), k(0)], lambda x, _: x[None], known=[1], dims={0: ["N", 4]}),
    Case("Unsqueeze", [floats(3, 4), k(-1, 0)], lambda x, _: x[None, :, :, None], known=[1]),
    Case("Unsqueeze", [floats(), k(0)], lambda x, _: x[None], known=[1]),
    Case("Squeeze", [floats(1, 3, 1), k(0)], lambda x, _: x[0], known=[1], dims={0: [1, "N", 1]}),
    Case("Squeeze", [floats(1, 3, 1), k(0, -1)], lambda x, _: x[0, :, 0], known=[1]),
    Case("Squeeze", [floats(1, 3, 1)], lambda x: x.squeeze()),
    Case("Squeeze", [floats(2, 3)], lambda x: x, note="nothing to drop"),
    Case("Split", [floats(5, 4), k(2, 3)], lambda x, _: x.split([2, 3]), known=[1]),
    Case("Split", [floats(2, 6), k(1, 2, 3)], lambda x, _: x.split([1, 2, 3], 1), {"axis": -1},
        known=[1], dims={0: ["N", 6]}),
    Case("Split", [floats(6, 2)], lambda x: x.split(2), outputs=3),
    Case("Split", [floats(7, 2)], lambda x: x.split(3), {"num_outputs": 3}, opset=18,
        dims={0: ["N", 2]}),
    Case("Concat", [floats(2, 3), floats(4, 3)], lambda a, b: torch.cat([a, b]), {"axis": 0}),
    Case("Concat", [floats(2, 3), floats(2, 1), floats(2, 2)], lambda *x: torch.cat(x, -1),
        {"axis": -1}, dims={0: ["N", 3], 1: ["N", 1], 2: ["N", "M"]}),
    Case("Concat", [floats(2, 3), floats(0, 3)], lambda a, b: torch.cat([a, b]), {"axis": 0}),
    Case("Concat", [floats(2)], lambda a: a, {"axis": 0}, note="one"),
    Case("Tile", [floats(2, 3), k(2, 1)], lambda x, _: x.repeat(2, 1), known=[1]),
    Case("Tile", [floats(2, 3), k(1, 4)], lambda x, _: x.repeat(1, 4), known=[1],
        dims={0: ["N", "M"]}),
    Case("Tile", [floats(2), k(0)], lambda x, _: x.repeat(0), known=[1], note="empty"),
    Case("Identity", [floats(2, 3)], lambda x: x.clone(), dims={0: ["N", 3]}),
    Case("Identity", [torch.tensor([True, False])], lambda x: x.clone()),
    Case("Pad", [floats(2, 3), k(0, 1, 0, 2)], lambda x, _: torch.nn.functional.pad(x, (1, 2)),
        known=[1], dims={0: ["N", "M"]}),
    Case("Pad", [floats(2, 3), k(1, -1, 1, 0), torch.tensor(2.5)], lambda x,
        *_: torch.nn.functional.pad(x, (-1, 0, 1, 1), value=2.5), known=[1, 2], reference=False,
        note="negative"),
    Case("Pad", [floats(2, 3), k(1, 2), torch.tensor(-1.0), k(-1)], lambda x,
        *_: torch.nn.functional.pad(x, (1, 2), value=-1.0), known=[1, 2, 3], opset=18),
    Case("Trilu", [floats(4, 4)], lambda x: x.triu(), dims={0: ["N", "N"]}),
    Case("Trilu", [floats(3, 4, 5)], lambda x: x.tril(), {"upper": 0}),
    Case("Trilu", [floats(4, 5), torch.tensor(-1)], lambda x, _: x.tril(-1), {"upper": 0},
        known=[1]),
    Case("Trilu", [torch.ones(3, 3, dtype=torch.bool), torch.tensor(1)], lambda x, _: x.triu(1),
        known=[1]),
    Case("Shape", [floats(2, 3, 4)], lambda x: torch.tensor(x.shape), dims={0: ["N", 3, "M"]},
        half=False),
    Case("Shape", [floats(2, 3, 4)], lambda x: torch.tensor(x.shape[1:-1]), {"start": 1, "end": -1},
        opset=15, half=False),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        (Case("Reshape", [floats(4, 6), k(5, 5)], None, known=[1]), torch_ort.UserError,
         r"Reshape: number of elements: got \[4,6\], want \[5,5\]"),
        (Case("Slice", [floats(5), k(0), k(5), k(0), k(0)], None, known=[1, 2, 3, 4]),
         torch_ort.UserError, "Slice: step: got 0"),
        (Case("Concat", [floats(2, 3), floats(2, 4)], None, {"axis": 0}), torch_ort.UserError,
         "Concat: dims differ: got 4, want 3"),
        (Case("Transpose", [floats(2, 3)], None, {"perm": [0, 0]}), torch_ort.UserError,
         "Transpose: perm"),
        (Case("Squeeze", [floats(2, 3), k(0)], None, known=[1]), torch_ort.UserError,
         "Squeeze: size of axis 0: got 2, want 1"),
        (Case("Unsqueeze", [floats(2, 3), k(4)], None, known=[1]), torch_ort.UserError,
         "Unsqueeze: axis out of range: got 4"),
        (Case("Pad", [floats(2, 3), k(0, 1, 0, 1)], None, {"mode": "reflect"}, known=[1]),
         torch_ort.Unsupported, "Pad: mode: got 'reflect', want 'constant'"),
        (Case("Reshape", [floats(4, 6), k(3, 8)], None), torch_ort.Unsupported,
         "'x1' depends on data"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_forms_say_what_is_wrong(case: Case, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(case)
