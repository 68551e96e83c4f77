"""Products of matrices by the engine's kernel, against float64."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.regions import CACHES, crossed
from torch_ort import _C

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ISAS = _C.isa_names()
# Rows, sums and columns: one number, less than a tile, tiles with and without a rest, and more than
# the 960 x 384 numbers and the 256 steps that are worked on at once.
SIZES = [
    (1, 1, 1), (1, 7, 1), (3, 5, 2), (12, 16, 32), (13, 17, 33), (12, 1, 48), (25, 300, 16),
    (64, 64, 64), (65, 257, 70), (970, 20, 40), (20, 520, 400), (1000, 30, 390),
]  # fmt: skip
FORMS = ["NN", "NT", "TN", "TT"]


def matrix(rows: int, columns: int, dtype: torch.dtype, form: str = "N") -> torch.Tensor:
    if form == "T":
        return torch.randn(columns, rows, dtype=torch.float64).to(dtype).t()
    return torch.randn(rows, columns, dtype=torch.float64).to(dtype)


def product(a, b, start=None, isa="", result=None):
    if result is None:
        sizes = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        result = torch.full((*sizes, a.shape[-2], b.shape[-1]), math.nan, dtype=a.dtype)
    _C.Product(result, a, b, start, isa).run()
    return result


def exact(a, b, start=None):
    total = a.double() @ b.double()
    return total if start is None else start.double() + total


def assert_near(result, a, b, start=None):
    """No number is further off than sums of so many products may be, in any order."""
    want = exact(a, b, start)
    size = exact(a.abs(), b.abs(), None if start is None else start.abs())
    of_sums = torch.finfo(torch.float64 if a.dtype == torch.float64 else torch.float32).eps
    of_result = torch.finfo(a.dtype).eps
    allowed = of_sums * (a.shape[-1] + 4) * size + of_result * want.abs()
    assert result.dtype == a.dtype
    wrong = ~((result.double() - want).abs() <= allowed + torch.finfo(a.dtype).tiny)
    assert not wrong.any(), (result[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_sizes(form, dtype, isa):
    torch.manual_seed(0)
    for m, k, n in SIZES:
        a, b = matrix(m, k, dtype, form[0]), matrix(k, n, dtype, form[1])
        assert_near(product(a, b, isa=isa), a, b)


# More rows and columns than a block has, a left factor that is packed since its rows or steps are a
# page apart or since there are many columns, and one that is read in place. Few rows, with a right
# factor that is packed since its rows are a page apart.
BLOCKS = [
    (1960, 20, 33), (100, 300, 800), (100, 1024, 130), (1024, 300, 130), (97, 40, 390),
    (97, 40, 100), (50, 300, 1024),
]  # fmt: skip


@crossed(isa=ISAS, dtype=FLOATS, form=FORMS, sizes=BLOCKS)
def test_several_blocks(sizes, form, dtype, isa):
    torch.manual_seed(0)
    m, k, n = sizes
    a, b = matrix(m, k, dtype, form[0]), matrix(k, n, dtype, form[1])
    for start in (None, torch.randn(n, dtype=torch.float64).to(dtype).expand(1, n)):
        assert_near(product(a, b, start, isa), a, b, start)


# Right factors of up to 144 rows, which are read where they stand if the caches are wide: less than
# a tile of rows and several, fewer columns than a panel has and many panels, rows that are a page
# apart, and sums of more steps than are added at once.
IN_PLACE = [
    (5, 300, 70), (12, 129, 64), (13, 257, 999), (50, 513, 1024), (144, 130, 97), (145, 300, 65),
]  # fmt: skip


@crossed(isa=ISAS, dtype=FLOATS, form=FORMS, caches=CACHES, sizes=IN_PLACE)
def test_right_factors_that_are_read_in_place(sizes, caches, form, dtype, isa, planted):
    torch.manual_seed(4)
    planted(caches)
    m, k, n = sizes
    a, b = matrix(m, k, dtype, form[0]), matrix(k, n + 3, dtype, form[1])[:, 3:]
    for start in (None, matrix(m, n, dtype)):
        assert_near(product(a, b, start, isa), a, b, start)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 70), k=st.integers(0, 600), n=st.integers(0, 70), form=st.sampled_from(FORMS),
    dtype=st.sampled_from(FLOATS), starts=st.booleans(), turned=st.booleans(),
)  # fmt: skip
def test_any_sizes(isa, m, k, n, form, dtype, starts, turned):
    a, b = matrix(m, k, dtype, form[0]), matrix(k, n, dtype, form[1])
    start = matrix(m, n, dtype) if starts else None
    result = matrix(m, n, dtype, "T" if turned else "N").fill_(math.nan)
    assert_near(product(a, b, start, isa, result), a, b, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_are_those_of_other_kernels(dtype):
    torch.manual_seed(0)
    for m, k, n in [(64, 512, 64), (40, 2000, 40)]:
        a, b = matrix(m, k, dtype), matrix(k, n, dtype)
        want = exact(a, b)
        ours = (product(a, b).double() - want).abs().mean()
        theirs = ((a @ b).double() - want).abs().mean()
        assert ours <= 1.5 * theirs


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("k", [0, 3, 300])
def test_what_the_sums_begin_with(k, dtype):
    torch.manual_seed(1)
    m, n = 30, 45
    a, b = matrix(m, k, dtype), matrix(k, n, dtype)
    starts = {
        "matrix": matrix(m, n, dtype),
        "turned": matrix(m, n, dtype, "T"),
        "parts": matrix(m, 2 * n, dtype)[:, ::2],
        "row": matrix(1, n, dtype),
        "column": matrix(m, 1, dtype),
        "number": matrix(1, 1, dtype),
        "expanded row": matrix(1, n, dtype).expand(m, n),
    }
    for name, start in starts.items():
        for turned in "NT":
            result = matrix(m, n, dtype, turned).fill_(math.nan)
            assert_near(product(a, b, start, result=result), a, b, start), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adds_to_the_result(dtype):
    torch.manual_seed(1)
    a, b, result = matrix(30, 300, dtype), matrix(300, 45, dtype), matrix(30, 45, dtype)
    before = result.clone()
    assert_near(product(a, b, result, result=result), a, b, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layouts(dtype):
    """Rows that are far apart, columns that are, none side by side, expanded and overlapping."""
    torch.manual_seed(2)
    m, k, n = 29, 37, 35
    wide = matrix(4 * m, 4 * max(k, n), dtype)
    lefts = [
        wide[:m, :k], wide[: 2 * m : 2, :k], wide[:m, : 3 * k : 3], wide[::4, 1 : 1 + 2 * k : 2],
        wide[:1, :k].expand(m, k), wide[:m, :1].expand(m, k),
        wide.flatten().as_strided((m, k), (1, 1)),
    ]  # fmt: skip
    rights = [wide[:k, :n], wide[:k, : 2 * n : 2], wide.t()[: 2 * k : 2, : 3 * n : 3]]
    for a in lefts:
        for b in rights:
            assert_near(product(a, b), a, b)
            for step in ((1, 1), (2, 1), (1, 3), (2, 2)):
                room = torch.full((2 * m, 3 * n), 7.0, dtype=dtype)
                kept = torch.ones_like(room, dtype=torch.bool)
                part = (slice(0, step[0] * m, step[0]), slice(0, step[1] * n, step[1]))
                kept[part] = False
                assert_near(product(a, b, result=room[part]), a, b)
                assert (room[kept] == 7).all()  # nothing beside the result is written


BATCHES = [
    ((5,), (5,)), ((5,), (1,)), ((1,), (5,)), ((2, 3), (2, 3)), ((2, 1), (1, 3)), ((0,), (0,)),
    ((40,), (40,)),
]  # fmt: skip


@pytest.mark.parametrize(("m", "k"), [(14, 20), (2, 150)], ids=["packed", "streamed"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_batches(dtype, m, k):
    torch.manual_seed(3)
    for left, right in BATCHES:
        a = torch.randn(*left, m, k, dtype=torch.float64).to(dtype)
        b = torch.randn(*right, k, 33, dtype=torch.float64).to(dtype)
        start = torch.randn(33, dtype=torch.float64).to(dtype)
        assert_near(product(a, b), a, b)
        of_batch = start.expand(*([1] * len(left)), 1, 33)
        assert_near(product(a, b, of_batch), a, b, start)
        turned = b.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert_near(product(a, turned), a, turned)
        assert_near(product(a, turned, of_batch), a, turned, start)
    a = torch.randn(6, m, k, dtype=torch.float64).to(dtype)
    b = torch.randn(k, 33, dtype=torch.float64).to(dtype).expand(6, k, 33)
    assert_near(product(a, b), a, b)
    heads = torch.randn(4, m, 6, k, dtype=torch.float64).to(dtype).transpose(1, 2)
    assert_near(product(heads, heads.transpose(-1, -2)), heads, heads.transpose(-1, -2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)])
def test_nothing(sizes, dtype):
    m, k, n = sizes
    a, b = matrix(m, k, dtype), matrix(k, n, dtype)
    assert torch.equal(product(a, b), torch.zeros(m, n, dtype=dtype))
    start = matrix(m, n, dtype)
    assert torch.equal(product(a, b, start), start)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinities_and_nan_stay_where_they_belong(dtype):
    torch.manual_seed(4)
    a, b = matrix(27, 40, dtype), matrix(40, 37, dtype)
    a[3, 5], a[8, 1], a[20] = math.inf, math.nan, 0
    b[7, 4], b[9] = -math.inf, 0
    a[:, 7].clamp_(min=0.5)
    result, want = product(a, b), exact(a, b)
    assert torch.equal(result.isnan(), want.isnan())
    assert torch.equal(result.isinf(), want.isinf())
    assert torch.equal(result[result.isinf()].sign(), want[want.isinf()].sign().to(dtype))
    large = matrix(27, 40, dtype) + 1000
    assert_near(product(large, b.nan_to_num(0, 0, 0)), large, b.nan_to_num(0, 0, 0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize(
    "sizes",
    [
        (1000, 300, 400), (64, 513, 1000), (200, 300, 130), (13, 4000, 37), (2000, 64, 5),
        (1, 3000, 500), (4, 700, 1000), (7, 300, 2000), (16, 40, 40000), (5000, 300, 1),
    ],
)  # fmt: skip
def test_the_number_of_threads_changes_no_bit(sizes, caches, dtype, planted):
    torch.manual_seed(5)
    planted(caches)
    m, k, n = sizes
    for form in FORMS:
        a, b = matrix(m, k, dtype, form[0]), matrix(k, n, dtype, form[1])
        results = []
        for threads in (1, 2, 3, 4, 7):
            torch.set_num_threads(threads)
            results.append(product(a, b))
        assert all(torch.equal(result, results[0]) for result in results)


# Few rows, whose right factor is read where it stands: numbers of rows with and without a rest,
# sums and columns that fill no vector, more columns than a stripe has, and rows that are far apart.
STREAMED = [
    *((m, 128, 37) for m in range(1, 9)), (1, 517, 70), (3, 1031, 5), (4, 300, 2100), (7, 200, 33),
    (2, 5, 4100), (16, 9, 16500),
]  # fmt: skip


@crossed(isa=ISAS, dtype=[torch.float32, torch.float64], form=FORMS, sizes=STREAMED)
def test_few_rows(sizes, form, dtype, isa):
    torch.manual_seed(7)
    m, k, n = sizes
    a, b = matrix(m, k, dtype, form[0]), matrix(k, n, dtype, form[1])
    starts = [None, matrix(1, n, dtype).expand(m, n), matrix(m, 1, dtype), matrix(m, n, dtype)]
    for start in starts:
        assert_near(product(a, b, start, isa), a, b, start)
        turned = matrix(m, n, dtype, "T").fill_(math.nan)
        assert_near(product(a, b, start, isa, turned), a, b, start)
        room = torch.full((2 * m, 3 * n), 7.0, dtype=dtype)
        assert_near(product(a, b, start, isa, room[::2, ::3]), a, b, start)
        assert (room[1::2] == 7).all()
        assert (room[:, 1::3] == 7).all()
    before = starts[-1].clone()
    assert_near(product(a, b, starts[-1], isa, starts[-1]), a, b, before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_column(dtype, isa):
    """A matrix times a vector is the transpose of a product of one row."""
    torch.manual_seed(8)
    for m, k in [(300, 128), (1, 128), (33, 517), (4100, 20), (5, 1)]:
        for form in FORMS:
            a, b = matrix(m, k, dtype, form[0]), matrix(k, 1, dtype, form[1])
            column, number = matrix(m, 1, dtype), matrix(1, 1, dtype)
            for start in (None, column, number):
                assert_near(product(a, b, start, isa), a, b, start)
            room = torch.full((m, 3), 7.0, dtype=dtype)
            assert_near(product(a, b, column, isa, room[:, 1:2]), a, b, column)
            assert (room[:, ::2] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_few_rows_of_infinities_and_nan(dtype):
    torch.manual_seed(10)
    for form in FORMS:
        a, b = matrix(3, 150, dtype, form[0]), matrix(150, 37, dtype, form[1])
        a[0, 5], a[1, 149], b[7, 4], b[149, 36] = math.inf, math.nan, -math.inf, math.inf
        result, want = product(a, b), exact(a, b)
        assert torch.equal(result.isnan(), want.isnan())
        assert torch.equal(result.isinf(), want.isinf())
        large = matrix(3, 150, dtype, form[0]) + 1000
        finite = b.nan_to_num(0, 0, 0)
        assert_near(product(large, finite), large, finite)


def product_of(m, k, n, form, dtype=torch.float32):
    a, b = matrix(m, k, dtype, form[0]), matrix(k, n, dtype, form[1])
    return _C.Product(torch.empty(m, n, dtype=dtype), a, b)


def test_where_few_rows_are_streamed():
    def is_streamed(*sizes):
        return str(product_of(*sizes)).endswith(", streamed\n")

    assert is_streamed(1, 128, 100, "NT")
    assert is_streamed(8, 128, 100, "NT")
    assert not is_streamed(9, 128, 100, "NT")
    assert not is_streamed(1, 127, 100, "NT")  # short columns
    assert is_streamed(2, 7, 100, "NN")
    assert not is_streamed(17, 7, 20000, "NN")
    assert is_streamed(100, 128, 1, "NN")
    assert not is_streamed(1, 128, 100, "NT", torch.bfloat16)
    a, apart = torch.randn(1, 128), torch.randn(256, 200)[::2, ::2]
    assert ", streamed" not in str(_C.Product(torch.empty(1, 100), a, apart))


def test_vectors_are_preferred_where_they_are_streamed():
    for each in [(1, 128, 100, "NT"), (1, 7, 100, "NN"), (100, 128, 1, "NN"), (100, 7, 1, "TN")]:
        assert product_of(*each).is_preferred, each
    for each in [(1, 64, 100, "NT"), (100, 64, 1, "NN"), (1, 128, 100, "NT", torch.bfloat16)]:
        assert not product_of(*each).is_preferred, each


def test_two_threads_of_python_at_once():
    torch.manual_seed(6)
    work = [
        (matrix(200, 300, torch.float32), matrix(300, 100 + i, torch.float32)) for i in range(8)
    ]
    alone = [product(a, b) for a, b in work]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for result, want in zip(pool.map(lambda ab: product(*ab), work), alone, strict=True):
                assert torch.equal(result, want)


def test_in_a_forked_process():
    a, b = matrix(200, 300, torch.float32), matrix(300, 100, torch.float32)
    torch.set_num_threads(1)  # a runtime of threads does not survive a fork, with any kernel
    want = product(a, b)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product(a, b), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_says_what_it_does():
    a, b = torch.randn(3, 14, 5), torch.randn(3, 5, 6)
    it = _C.Product(torch.empty(3, 14, 6), a, b, torch.randn(1, 1, 6))
    assert str(it) == "product, 3 times 14 x 5 x 6 of float32, added to\n"
    turned = torch.empty(6, 14, dtype=torch.float64).t()
    it = _C.Product(turned, a[0].double(), b[0].double())
    assert str(it) == "product, 6 x 5 x 14 of float64, turned\n"


class TestErrors:
    def test_sizes(self):
        with pytest.raises(_C.InternalError, match="got 2 x 3 times 4 x 5 for 2 x 5"):
            _C.Product(torch.empty(2, 5), torch.empty(2, 3), torch.empty(4, 5))
        with pytest.raises(_C.InternalError, match="got an operand of 1 dims, want 2 or more"):
            _C.Product(torch.empty(5), torch.empty(5), torch.empty(5))
        with pytest.raises(_C.InternalError, match="dim 0: got 3, want 4"):
            _C.Product(torch.empty(4, 2, 2), torch.empty(3, 2, 2), torch.empty(4, 2, 2))
        with pytest.raises(_C.InternalError, match="got 3 x 2 to begin with, want 2 x 2"):
            _C.Product(*(torch.empty(2, 2) for _ in range(3)), torch.empty(3, 2))

    def test_dtypes(self):
        with pytest.raises(_C.Unsupported, match="got float32 and float64 for float32"):
            _C.Product(torch.empty(2, 2), torch.empty(2, 2), torch.empty(2, 2, dtype=torch.float64))
        with pytest.raises(_C.Unsupported, match="want one dtype of floats"):
            _C.Product(*(torch.empty(2, 2, dtype=torch.int64) for _ in range(3)))

    def test_instruction_set(self):
        with pytest.raises(_C.UserError, match="isa: got 'sse', want one of portable"):
            _C.Product(*(torch.empty(2, 2) for _ in range(3)), isa="sse")
