"""Lists of rows: how they are made, and what regions and zeros do with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu.regions import read, run, type_text
from torch_ort import _C

SEQUENCES, LENGTH = 3, 5


def make_list(attrs: str, **inputs: Tensor) -> list[int]:
    """Run a torch_ort.Rows over three sequences of five; give the rows that it lists."""
    types = {name: type_text(each.dtype, each.shape) for name, each in inputs.items()}
    node = f"y = torch_ort.Rows <{attrs}> ({', '.join(inputs)})"
    result = {"y": type_text(torch.int64, (SEQUENCES, LENGTH + 1))}
    listed = run(read(types, [node], ["y"], types=result), inputs)[0].flatten()
    return listed[1 : 1 + listed[0]].tolist()


def labels(*, dtype: torch.dtype = torch.int64) -> Tensor:
    numbers = torch.full((SEQUENCES, LENGTH), -100, dtype=dtype)
    numbers[0, 1] = numbers[2, 3] = 4
    return numbers


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_of_labels(dtype: torch.dtype) -> None:
    attrs = 'kinds = ["labels"], ignored = [-100], is_causal = [0]'
    given = labels(dtype=dtype)
    assert make_list(attrs, x=given) == [1, 13]
    assert make_list(attrs + ", is_closed = 1", x=given) == [0, 1, 10, 11, 12, 13]
    assert make_list(attrs + ", places = [0, -1]", x=given) == [0, 1, 4, 5, 9, 10, 13, 14]
    assert make_list(attrs, x=given.flatten()) == [1, 13]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_of_masks(dtype: torch.dtype) -> None:
    hidden = torch.zeros(SEQUENCES, 1, 1, LENGTH, dtype=torch.bool)
    hidden[0, ..., 2:] = True
    hidden[1, ..., 1:4] = True
    hidden[2, ..., 0] = True
    lowest = False if dtype == torch.bool else torch.finfo(dtype).min
    mask = hidden if dtype == torch.bool else torch.zeros(hidden.shape, dtype=dtype)
    if dtype != torch.bool:
        mask = mask.masked_fill(hidden, lowest)
    attrs = 'kinds = ["mask"], ignored = [0], is_causal = [0]'
    assert make_list(attrs, x=mask) == [0, 1, 5, 9, 11, 12, 13, 14]
    # A first query that sees no key gives its whole sequence weights.
    causal = attrs.replace("is_causal = [0]", "is_causal = [1]")
    assert make_list(causal, x=mask) == [0, 1, 5, 9, 10, 11, 12, 13, 14]
    if dtype == torch.bool:
        return
    slight = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, lowest * 0.4)
    assert make_list(attrs, x=slight) == list(range(15))
    mask[0] = -torch.inf
    assert make_list(attrs, x=mask)[:5] == [0, 1, 2, 3, 4]


def test_of_masks_for_each_query() -> None:
    mask = torch.full((1, 2, LENGTH, LENGTH), -torch.inf)
    mask[0, 0, :, 0] = 0
    mask[0, 1, :, 0] = 0
    mask[0, 1, 3, 2] = 0
    attrs = 'kinds = ["mask"], ignored = [0], is_causal = [0]'
    assert make_list(attrs, x=mask) == [0, 2, 5, 7, 10, 12]
    mask[0, 0, 4] = -torch.inf
    assert make_list(attrs, x=mask) == list(range(15))


def test_nine_of_ten_are_all() -> None:
    numbers = torch.full((SEQUENCES, LENGTH), 1)
    numbers[1, 1] = -100
    attrs = 'kinds = ["labels"], ignored = [-100], is_causal = [0]'
    assert make_list(attrs, x=numbers) == list(range(15))
    numbers[1, 2] = -100
    assert make_list(attrs, x=numbers) == [*range(6), *range(8, 15)]


@pytest.mark.parametrize("columns", [(), (4,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_zeros_in_rows_that_are_not_listed(dtype: torch.dtype, columns: tuple[int, ...]) -> None:
    x = torch.randint(1, 3, (SEQUENCES, LENGTH, *columns)).to(dtype)
    listed = torch.zeros(SEQUENCES, LENGTH + 1, dtype=torch.int64)
    listed.view(-1)[:4] = torch.tensor([3, 0, 7, 14])
    inputs = {"x": type_text(dtype, x.shape), "rows": type_text(torch.int64, listed.shape)}
    node = "y = torch_ort.ZeroRows (x, rows)"
    graph = read(inputs, [node], ["y"], types={"y": type_text(dtype, x.shape)})
    got = run(graph, {"x": x, "rows": listed})[0]
    want = torch.zeros_like(x)
    for row in (0, 7, 14):
        want.view(15, -1)[row] = x.view(15, -1)[row]
    assert torch.equal(got, want)


def test_a_list_that_is_none() -> None:
    listed = torch.tensor([[16, 0, 0, 0, 0, 0]] * SEQUENCES)
    inputs = {"x": "float[3,5]", "rows": "int64[3,6]"}
    graph = read(inputs, ["y = torch_ort.ZeroRows (x, rows)"], ["y"], types={"y": "float[3,5]"})
    with pytest.raises(IndexError, match="rows: got 16 of them, want 0 to 15"):
        run(graph, {"x": torch.ones(3, 5), "rows": listed})
    listed[0, 0], listed[0, 1] = 2, 4
    with pytest.raises(IndexError, match="rows: got 0 at 1, want 5 or more, and less than 15"):
        run(graph, {"x": torch.ones(3, 5), "rows": listed})


def test_what_is_no_kind() -> None:
    with pytest.raises((_C.InternalError, _C.UserError), match="kind: got 'mash', want labels"):
        make_list('kinds = ["mash"], ignored = [0], is_causal = [0]', x=labels())
