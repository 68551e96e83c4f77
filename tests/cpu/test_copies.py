"""Copies by kernels of the engine: small ones, and those whose rows are columns before."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import regions
import torch
from hypothesis import given, settings

from torch_ort import _C

pytestmark = pytest.mark.ort_only

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


def copy_of(dtype: torch.dtype, sizes: list[int], order: tuple[int, ...]) -> _C.Graph:
    """Write a transpose, and the copy that makes it row-major."""
    results = [sizes[axis] for axis in order]
    return regions.read(
        {"x": regions.type_text(dtype, sizes)},
        [f"t = Transpose <perm = [{', '.join(map(str, order))}]> (x)", "y = Identity (t)"],
        ["y"],
        types={"y": regions.type_text(dtype, results)},
    )


def numbers(dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    low = -(2**30)
    return torch.randint(low, -low, sizes, dtype=torch.int64, generator=generator).to(dtype)


def check(
    dtype: torch.dtype, sizes: list[int], order: tuple[int, ...], isa: str = "", own: bool = True
) -> None:
    session = _C.Session.compile(copy_of(dtype, sizes, order), {}, _C.SessionOptions(isa=isa))
    x = numbers(dtype, sizes)
    (got,) = session.run({"x": x}).values()
    assert got.is_contiguous()
    assert torch.equal(got, x.permute(order))
    texts = [text for _, text in session.programs()]
    assert any("transposing copy" in text for text in texts) == own


TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
SHAPES = {
    "images to channels last": ([2, 32, 16, 16], TO_LAST),
    "and back": ([2, 16, 16, 32], TO_FIRST),
    "of odd sizes": ([3, 19, 13, 11], TO_LAST),
    "a matrix": ([65, 131], (1, 0)),
    "four rows": ([4, 4099], (1, 0)),
    "four columns": ([4099, 4], (1, 0)),
    "sequences": ([3, 70, 33], (0, 2, 1)),
    "two dims in front": ([2, 3, 40, 24], (1, 0, 3, 2)),
    "all dims turned": ([9, 5, 7, 20], (3, 2, 1, 0)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=regions.NAMES.get)
@pytest.mark.parametrize("isa", regions.ISAS)
def test_copies(isa: str, dtype: torch.dtype, shape: str) -> None:
    check(dtype, *SHAPES[shape], isa)


@pytest.mark.parametrize(
    ("dtype", "sizes", "order"),
    [
        (torch.bfloat16, [64, 80], (1, 0)),
        (torch.bool, [64, 80], (1, 0)),
        (torch.float32, [40, 30], (1, 0)),
        (torch.float32, [3, 9000], (1, 0)),
        (torch.float32, [6, 40, 80], (1, 0, 2)),
    ],
    ids=["two bytes", "one byte", "few numbers", "few rows", "whole rows"],
)
def test_what_stays_with_pytorch(dtype, sizes, order) -> None:
    check(dtype, sizes, order, own=False)


def copy_in_any_order(dtype: torch.dtype, sizes: list[int], choose) -> list[str]:
    """Check a copy with its dims in another order, and give the texts of its kernels."""
    order = list(range(len(sizes)))
    choose.shuffle(order)
    session = _C.Session.compile(copy_of(dtype, sizes, tuple(order)), {}, _C.SessionOptions())
    x = numbers(dtype, sizes)
    (got,) = session.run({"x": x}).values()
    assert torch.equal(got, x.permute(order))
    return [text for _, text in session.programs()]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=5).filter(lambda x: math.prod(x) < 200_000),
    st.randoms(use_true_random=False),
    st.sampled_from(DTYPES),
)
def test_any_order_of_dims(sizes: list[int], choose, dtype: torch.dtype) -> None:
    copy_in_any_order(dtype, sizes, choose)


SMALL = (*DTYPES, torch.bfloat16, torch.float16, torch.int16, torch.int8, torch.bool)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda x: math.prod(x) < 2000),
    st.randoms(use_true_random=False),
    st.sampled_from(SMALL),
)
def test_small_copies(sizes: list[int], choose, dtype: torch.dtype) -> None:
    assert all("copy, " in text for text in copy_in_any_order(dtype, sizes, choose))


@pytest.mark.parametrize(("rows", "is_small"), [(63, True), (64, False)])
def test_where_small_copies_end(rows: int, is_small: bool) -> None:
    session = _C.Session.compile(
        copy_of(torch.float32, [rows, 64], (1, 0)), {}, _C.SessionOptions()
    )
    session.run({"x": torch.randn(rows, 64)})
    ((_, text),) = session.programs()
    assert text.startswith("copy, " if is_small else "transposing copy, ")


@pytest.mark.parametrize("rows", [8, 80])
def test_nan_bits_are_copied(rows: int) -> None:
    x = torch.arange(0x7F800001, 0x7F800001 + rows * 64, dtype=torch.int64).int().view(rows, 64)
    graph = copy_of(torch.float32, [rows, 64], (1, 0))
    (got,) = regions.run(graph, {"x": x.view(torch.float32)})
    assert torch.equal(got.view(torch.int32), x.t())


def test_inputs_with_gaps_and_repeated_rows() -> None:
    wide = torch.randn(4, 70, 90)
    call = torch.compile(lambda x: x.transpose(1, 2).contiguous(), backend="ort")
    for x in (wide[:, 3:67, 5:85], wide[:1, :64, :80].expand(4, 64, 80), wide[::2, ::2, ::3]):
        torch.testing.assert_close(call(x), x.transpose(1, 2), rtol=0, atol=0)


def test_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            check(torch.float32, [4, 48, 40, 40], TO_LAST)
    finally:
        torch.set_num_threads(before)
