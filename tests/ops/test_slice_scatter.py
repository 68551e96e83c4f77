"""A copy of a tensor, a part of which is replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import Case, check, floats, given, one_node_model, read, run, with_half

import torch_ort
from torch_ort import _C


def scatter(
    part: torch.Tensor, base: torch.Tensor, axes: list[int], starts: list[int], steps: list[int]
) -> torch.Tensor:
    result = base.clone()
    view = result
    for axis, start, step in zip(axes, starts, steps, strict=True):
        end = start + max(part.shape[axis] - 1, 0) * step + min(part.shape[axis], 1)
        view = torch.ops.aten.slice(view, axis, start, end, step)
    view.copy_(part)
    return result


def of_base(part: torch.Tensor, base: torch.Tensor, note: str = "", **attrs: Any) -> Case:
    axes, starts = attrs.get("axes", []), attrs.get("starts", [])
    steps = attrs.get("steps", [1] * len(axes))
    return Case(
        "SliceScatter", [part, base], lambda part, base: scatter(part, base, axes, starts, steps),
        attrs, domain="torch_ort", note=note,
    )  # fmt: skip


def of_zeros(part: torch.Tensor, shape: list[int], **attrs: Any) -> Case:
    case = of_base(part, part, **attrs)
    return Case(
        "SliceScatter", [part], lambda part: case.eager(part, part.new_zeros(shape)),
        {**attrs, "shape": shape}, domain="torch_ort", note="zeros",
    )  # fmt: skip


NUMBERS = torch.arange(2**40, 2**40 + 12).view(3, 4)
CASES = [
    of_base(floats(2, 1, 4), floats(2, 5, 4), axes=[1], starts=[3]),
    of_base(floats(2, 3, 4), floats(2, 5, 4), axes=[1], starts=[0], steps=[2]),
    of_base(floats(2, 2, 3), floats(2, 5, 4), axes=[-1, 1], starts=[1, 2]),
    of_base(floats(2, 5, 4), floats(2, 5, 4)),
    of_base(floats(2, 0, 4), floats(2, 5, 4), "nothing", axes=[1], starts=[5]),
    of_base(floats(0, 2), floats(0, 5), "empty", axes=[1], starts=[1]),
    of_base(floats(), floats(), "one number"),
    of_base(floats(5, 2).t(), floats(5, 4).t(), "turned", axes=[0], starts=[1]),
    of_base(floats(64, 80, 3), floats(64, 80, 9), "large", axes=[2], starts=[1], steps=[3]),
    of_base(floats(90, 80).t(), floats(100, 90), "large and turned", axes=[0], starts=[7]),
    of_base(floats(2, 1, 4), floats(2, 5, 4), axes=[1], starts=[3], steps=[2**62]),
    of_base(floats(2, 0, 4), floats(2, 5, 4), "nothing", axes=[1], starts=[2**62], steps=[2**62]),
    of_base(NUMBERS[:1], NUMBERS + 7, axes=[0], starts=[2]),
    of_base(NUMBERS[:, :2].int(), NUMBERS.int(), axes=[1], starts=[1], steps=[2]),
    of_base(NUMBERS[:1] > 0, NUMBERS < 0, axes=[0], starts=[1]),
    of_base(floats(3, 1).half(), floats(3, 4).half(), axes=[1], starts=[3]),
    of_zeros(floats(2, 1, 4), [2, 5, 4], axes=[1], starts=[3]),
    of_zeros(NUMBERS[:, :1], [3, 4], axes=[1], starts=[0]),
]
SYMBOLIC = of_base(floats(2, 1, 4), floats(2, 5, 4), "symbols", axes=[1], starts=[3])
SYMBOLIC.dims = {0: ["N", 1, 4], 1: ["N", "M", 4]}


@pytest.mark.parametrize("case", with_half([*CASES, SYMBOLIC]), ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"axes": [1], "starts": [3]},
         "part: got 3 elements from 3 on with step 1 along axis 1, want them within 5"),
        ({"axes": [1], "starts": [0], "steps": [2**62]}, f"3 elements from 0 on with step {2**62}"),
        ({"axes": [1], "starts": [2**63 - 1]}, f"3 elements from {2**63 - 1} on"),
        ({"axes": [1], "starts": [-1]}, "got start -1 and step 1, want a start from 0"),
        ({"axes": [1], "starts": [0], "steps": [0]}, "got start 0 and step 0, want .* from 1 on"),
        ({"axes": [1, 1], "starts": [0, 0]}, r"axes: got \[1,1\], want each once"),
        ({"axes": [1]}, "starts and steps: got 0 and 1, want 1 as axes has"),
        ({"axes": [1], "starts": [0], "steps": [1, 1]}, "got 1 and 2, want 1 as axes has"),
        ({"axes": [3], "starts": [0]}, "axis out of range: got 3"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_attributes_say_what_is_wrong(attrs: dict[str, Any], words: str) -> None:
    inputs = [floats(2, 3, 4), floats(2, 5, 4)]
    with pytest.raises(torch_ort.UserError, match=words):
        run(Case("SliceScatter", inputs, None, attrs, domain="torch_ort"))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([floats(3, 4), floats(2, 5, 4)], "part: got 2 dims, want 3 as the result has"),
        ([floats(2, 3, 4)], "shape: got none, want that of the result, if there is no base"),
        ([floats(2, 3, 4).half(), floats(2, 5, 4)],
         r"got a part of \[2, 3, 4\], want one that fits into \[2, 5, 4\] of the same dtype"),
        ([floats(3, 3, 4), floats(2, 5, 4)],
         "part: got 3 elements from 0 on with step 1 along axis 0, want them within 2"),
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_do_not_fit(inputs: list[torch.Tensor], words: str) -> None:
    attrs = {"axes": [1], "starts": [0]}
    with pytest.raises(torch_ort.UserError, match=words):
        run(Case("SliceScatter", inputs, None, attrs, domain="torch_ort"))


def test_a_symbol_that_is_too_large_for_its_place() -> None:
    graph = read(one_node_model(SYMBOLIC, 1, symbolic=True))
    words = r"got a part of \[2, 1, 4\], want one that fits into \[2, 2, 4\]"
    with pytest.raises(torch_ort.UserError, match=words):
        _C.run(graph, {**given(SYMBOLIC), "x1": floats(2, 2, 4)})
