"""Calls that the engine writes otherwise to have an out form: the same bits in the same layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ort
from tests.out_forms.layouts import CHANGES, dense, sliced, transposed

pytestmark = pytest.mark.ort_only

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.complex64)
ALL = (*NUMBERS, torch.bool)
Program = Callable[[Tensor], Tensor]

# By name: the program, and the dtypes that it takes.
OVERWRITES: dict[str, tuple[Program, tuple[torch.dtype, ...]]] = {
    "clone": (lambda x: x.clone(), ALL),
    "clone_dense": (lambda x: x.clone(memory_format=torch.contiguous_format), ALL),
    "to_double": (lambda x: x.to(torch.float64), (*NUMBERS[:-1], torch.bool)),
    "to_half": (lambda x: x.to(torch.bfloat16), (*NUMBERS[:-1], torch.bool)),
    "to_integers": (lambda x: x.to(torch.int64), (*NUMBERS[:-1], torch.bool)),
    "to_truth": (lambda x: x.to(torch.bool), ALL),
    "to_complex": (lambda x: x.to(torch.complex64), ALL),
    "zeros_like": (lambda x: torch.zeros_like(x), ALL),
    "ones_like": (lambda x: torch.ones_like(x), ALL),
    "full_like": (lambda x: torch.full_like(x, 3), NUMBERS),
    "full": (lambda x: torch.full(x.shape, 2.5, dtype=x.dtype), FLOATS),
    "zeros": (lambda x: torch.zeros(x.shape, dtype=x.dtype), ALL),
    "ones": (lambda x: torch.ones(x.shape, dtype=x.dtype), ALL),
    "new_zeros": (lambda x: x.new_zeros(x.shape), ALL),
    "new_full": (lambda x: x.new_full(x.shape, 3), NUMBERS),
}
REWRITES: dict[str, tuple[Program, tuple[torch.dtype, ...]]] = {
    "add_number": (lambda x: x + 1.5, NUMBERS),
    "add_integer": (lambda x: torch.add(x, 2, alpha=3), (*NUMBERS, torch.bool)),
    "subtract_number": (lambda x: x - 2, NUMBERS),
    "multiply_by_number": (lambda x: x * 0.3, ALL),
    "divide_by_number": (lambda x: x / 3, ALL),
    "relu": (lambda x: F.relu(x), NUMBERS[:-1]),
    "sum": (lambda x: x.sum(), ALL),
    "max": (lambda x: x.max(), (*NUMBERS[:-1], torch.bool)),
    "min": (lambda x: x.min(), (*NUMBERS[:-1], torch.bool)),
    "sum_as_double": (lambda x: x.sum(dtype=torch.float64), FLOATS),
    "dropout": (lambda x: torch.native_dropout(x, 0.4, True)[0], FLOATS),
    "mask_of_dropout": (lambda x: torch.native_dropout(x, 0.4, True)[1], FLOATS),
    "dropout_of_all": (lambda x: torch.native_dropout(x, 1.0, True)[0], FLOATS),
    "gradient_of_dropout": (
        lambda x: torch.ops.aten.native_dropout_backward(x, x.isfinite(), 2.5),
        FLOATS,
    ),
}
PROGRAMS = OVERWRITES | REWRITES
OPTIONS = {
    "check": 1,  # fills memory that is about to be written
    "exact_random": True,
    "disable": ("expand_composites", "fuse_attention", "fuse_regions", "fold_constants"),
}


def special_values(dtype: torch.dtype) -> Tensor:
    """Give a (2, 3, 4, 5) of numbers, zeros of both signs, NaN and infinities among them."""
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64) * 3
    if dtype.is_floating_point:
        values.view(-1)[:5] = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf])
    return values.to(dtype)


def run_all(x: Tensor, but: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Run all programs that take the dtype of `x`, each with random numbers of its own."""
    return {
        name: program(x)
        for name, (program, dtypes) in PROGRAMS.items()
        if x.dtype in dtypes and name not in but
    }


def assert_same_bits(got: Tensor, want: Tensor, name: str) -> None:
    assert got.dtype == want.dtype, name
    assert got.stride() == want.stride(), name
    torch.testing.assert_close(
        got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )
    if want.dtype.is_floating_point:
        assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan()), name


@pytest.mark.hands_over("inputs with a conjugate or negative bit")
@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        *((torch.float32, change) for change in CHANGES),
        *((dtype, change) for dtype in ALL[1:] for change in (dense, transposed, sliced)),
    ],
)
def test_bits_and_strides(dtype: torch.dtype, change: Callable) -> None:
    x = special_values(dtype)
    compiled = torch.compile(run_all, backend="ort", options=OPTIONS)
    for values in (change(x), change(x.flip(0))):
        torch.manual_seed(1)
        want = run_all(values)
        torch.manual_seed(1)
        got = compiled(values)
        assert list(got) == list(want)
        for name in want:
            assert_same_bits(got[name], want[name], name)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["steps_functional"] == 0


@pytest.mark.parametrize("sizes", [(2, 0, 3), ()])
def test_without_elements_and_without_dims(sizes: tuple[int, ...]) -> None:
    def run(x: Tensor) -> dict[str, Tensor]:
        return run_all(x, () if x.numel() else ("max", "min"))  # which raise for no elements

    compiled = torch.compile(run, backend="ort", options=OPTIONS)
    x = torch.randn(sizes)
    torch.manual_seed(1)
    want = run(x)
    torch.manual_seed(1)
    for name, got in compiled(x).items():
        # Eager gives no elements of another dtype here than everywhere else.
        if name != "mask_of_dropout" or x.numel():
            assert_same_bits(got, want[name], name)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("sizes", [(), (5,), (2, 3), (0,), (2, 0)])
def test_rows_looked_up(sizes: tuple[int, ...]) -> None:
    def look_up(ids: Tensor, *tables: Tensor) -> list[Tensor]:
        return [F.embedding(ids, table) for table in tables]

    tables = [torch.randn(7, 3).to(dtype) for dtype in (*FLOATS, torch.complex64)]
    strided = [tables[0].t().contiguous().t(), tables[0][:, :2]]
    compiled = torch.compile(look_up, backend="ort", options=OPTIONS)
    ids = torch.randint(7, sizes)
    results = compiled(ids, *tables, *strided)
    for got, want in zip(results, look_up(ids, *tables, *strided), strict=True):
        assert_same_bits(got, want, "embedding")
    assert torch_ort.counters()["fallbacks"] == 0
