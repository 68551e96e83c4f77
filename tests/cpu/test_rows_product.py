"""Products of listed rows by the engine's kernel, against float64; other rows hold NaN."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_ort
from tests.cpu.regions import CACHES, ISAS, REAL, crossed, read, type_text
from torch_ort import _C

LISTS = ["none", "one", "all", "run", "prefixes", "scattered", "half"]


def listed(kind: str, size: int) -> Tensor:
    """Give numbers of rows that increase."""
    every = torch.arange(size)
    if kind == "prefixes":
        return every[every % 40 < 25]
    chosen = {
        "none": every[:0],
        "one": every[size // 2 : size // 2 + 1],
        "all": every,
        "run": every[size // 3 : size // 3 + size // 2],
        "scattered": every[1::3],
        "half": every[torch.rand(size) < 0.5],
    }
    return chosen[kind]


def list_of(rows: Tensor, size: int) -> Tensor:
    """Give the list as kernels read it; what stands behind the rows is no number of a row."""
    rest = torch.full((size - len(rows),), 2**62)
    return torch.cat([torch.tensor([len(rows)]), rows, rest])


def matrix(rows: int, columns: int, dtype: torch.dtype, form: str = "N") -> Tensor:
    if form == "T":
        return matrix(columns, rows, dtype).t()
    if form == "S":  # neither rows nor columns lie one after the other
        return matrix(2 * rows, 3 * columns, dtype)[::2, ::3]
    return torch.randn(rows, columns, dtype=torch.float64).to(dtype)


def unlisted(rows: Tensor, size: int) -> Tensor:
    others = torch.ones(size, dtype=torch.bool)
    others[rows] = False
    return others


class Case:
    """Operands with NaN in all rows that are not listed."""

    def __init__(
        self, sizes: tuple[int, int, int], rows: Tensor, sums: bool, dtype: torch.dtype,
        forms: str = "NNN", start: str = "",
    ) -> None:  # fmt: skip
        m, k, n = sizes
        self.a, self.b = matrix(m, k, dtype, forms[0]), matrix(k, n, dtype, forms[1])
        self.result = matrix(m, n, dtype, forms[2]).fill_(math.nan)
        self.sums, self.rows, self.start = sums, rows, None
        if start:
            shape = {"matrix": (m, n), "row": (1, n), "column": (m, 1), "number": (1, 1)}[start]
            self.start = matrix(*shape, dtype)
        self.list = list_of(rows, k if sums else m)
        self.others = unlisted(rows, k if sums else m)
        if sums:
            self.a[:, self.others] = math.nan
            self.b[self.others] = math.nan
        else:
            self.a[self.others] = math.nan
            if self.start is not None and len(self.start) == m > 1:
                self.start[self.others] = math.nan

    def run(self, isa: str = "") -> Tensor:
        it = _C.Product(self.result, self.a, self.b, self.start, isa, self.list, self.sums)
        it.run()
        return self.result

    def check(self, isa: str = "") -> None:
        """Compare; no number is further off than sums of so many products may be."""
        result, start = self.run(isa), self.start
        a, b = self.a.double(), self.b.double()
        if self.sums:
            a, b = a[:, self.rows], b[self.rows]
        else:
            a = a[self.rows]
            assert result[self.others].isnan().all()  # nothing else is written
            result = result[self.rows]
            start = start[self.rows] if start is not None and len(start) > 1 else start
        begin = torch.zeros(1, 1).double() if start is None else start.double()
        want, size = begin + a @ b, begin.abs() + a.abs() @ b.abs()
        dtype = self.result.dtype
        of_sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        allowed = of_sums * (a.shape[1] + 4) * size + torch.finfo(dtype).eps * want.abs()
        wrong = ~((result.double() - want).abs() <= allowed + torch.finfo(dtype).tiny)
        assert result.shape == want.shape
        assert not wrong.any(), (result[wrong][:5], want[wrong][:5])


# More than the rows, columns and steps that are worked on at once, and less.
SIZES = [
    (50, 33, 40), (1, 1, 1), (40, 300, 33), (700, 600, 20), (20, 700, 400), (2000, 20, 18),
    (60, 30, 800),
]  # fmt: skip


@crossed(isa=ISAS, dtype=REAL, kind=LISTS, sums=[False, True])
def test_lists_and_sizes(sums, kind, dtype, isa):
    torch.manual_seed(0)
    for sizes in SIZES:
        rows = listed(kind, sizes[1] if sums else sizes[0])
        Case(sizes, rows, sums, dtype).check(isa)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("kind", ["run", "scattered"])
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
def test_layouts(sums, kind, dtype):
    torch.manual_seed(1)
    for a in "NTS":
        for b in "NTS":
            for result in "NTS":
                for sizes in [(60, 70, 50), (130, 61, 7)]:
                    rows = listed(kind, sizes[1] if sums else sizes[0])
                    Case(sizes, rows, sums, dtype, a + b + result).check()


@crossed(
    dtype=reversed(REAL),
    start=["matrix", "row", "column", "number"],
    kind=LISTS,
    sums=[False, True],
)
def test_what_the_sums_begin_with(sums, kind, start, dtype):
    torch.manual_seed(2)
    for form in "NTS":
        for k in (0, 5, 600):
            rows = listed(kind, k if sums else 45)
            Case((45, k, 37), rows, sums, dtype, "NN" + form, start).check()


@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
def test_adds_to_the_result(sums):
    torch.manual_seed(3)
    case = Case((60, 600, 50), listed("scattered", 600 if sums else 60), sums, torch.float32)
    case.start = torch.randn(60, 50)
    case.result.copy_(case.start)
    before = case.start.clone()
    want = Case((60, 600, 50), case.rows, sums, torch.float32)
    want.a, want.b, want.start = case.a, case.b, before
    want.run()
    case.start = case.result
    case.run()
    kept = slice(None) if sums else case.rows
    assert torch.equal(case.result[kept], want.result[kept])
    if not sums:
        assert torch.equal(case.result[case.others], before[case.others])


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("sizes", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)])
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
def test_nothing(sums, sizes, dtype):
    rows = torch.arange(sizes[1] if sums else sizes[0])
    for start in ("", "matrix"):
        Case(sizes, rows, sums, dtype, start=start).check()
        Case(sizes, rows[:0], sums, dtype, start=start).check()


@st.composite
def cases(draw) -> Case:
    sizes = tuple(draw(st.integers(0, most)) for most in (80, 560, 80))
    sums = draw(st.booleans())
    of = sizes[1] if sums else sizes[0]
    share = draw(st.sampled_from([0, 0.1, 0.5, 0.95, 1]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    rows = torch.arange(of)[torch.rand(of) < share]
    forms = "".join(draw(st.sampled_from("NTS")) for _ in range(3))
    start = draw(st.sampled_from(["", "matrix", "row", "column", "number"]))
    return Case(sizes, rows, sums, draw(st.sampled_from(REAL)), forms, start)


@settings(max_examples=150, deadline=None)
@given(case=cases(), isa=st.sampled_from(ISAS))
def test_any(case, isa):
    case.check(isa)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("kind", ["run", "scattered", "half"])
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
def test_the_number_of_threads_changes_no_bit(sums, kind, dtype):
    torch.manual_seed(4)
    for sizes in [(1000, 300, 400), (64, 1500, 800)]:
        for forms in ("NNN", "TNN", "NTT"):
            case = Case(sizes, listed(kind, sizes[1] if sums else sizes[0]), sums, dtype, forms)
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(case.run().clone())
            kept = slice(None) if sums else case.rows
            assert all(torch.equal(result[kept], results[0][kept]) for result in results)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
@pytest.mark.parametrize("caches", CACHES)
def test_all_rows_give_the_bits_of_a_dense_product(sums, dtype, caches, planted):
    torch.manual_seed(5)
    planted(caches)
    for forms, m in itertools.product(("NNN", "TNT", "NTN", "NNT"), (130, 200)):
        case = Case((m, 600, 90), listed("all", 600 if sums else m), sums, dtype, forms, "row")
        dense = torch.empty_like(case.result)
        _C.Product(dense, case.a, case.b, case.start).run()
        assert torch.equal(case.run(), dense)


def run_graph(case: Case, start_shape: tuple[int, ...] | None = None) -> Tensor:
    operands = {"a": case.a, "b": case.b, "rows": case.list}
    if case.start is not None:
        operands["c"] = case.start if start_shape is None else case.start.reshape(start_shape)
    inputs = {name: type_text(value.dtype, value.shape) for name, value in operands.items()}
    node = f"y = torch_ort.RowsProduct <sums = {int(case.sums)}> (a, b, "
    node += "c, rows)" if "c" in operands else ", rows)"
    text = type_text(case.result.dtype, case.result.shape)
    graph = read(inputs, [node], ["y"], types={"y": text})
    graph.verify("test")
    return _C.run(graph, operands)["y"]


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("start", ["", "matrix", "row"])
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
def test_as_a_node(sums, start, dtype):
    torch.manual_seed(6)
    case = Case((30, 40, 20), listed("scattered", 40 if sums else 30), sums, dtype, start=start)
    kept = slice(None) if sums else case.rows
    assert torch.equal(run_graph(case)[kept], case.run()[kept])
    if start == "row":
        assert torch.equal(run_graph(case, (20,))[kept], case.result[kept])


def test_says_what_it_does():
    case = Case((3, 4, 5), torch.tensor([1]), False, torch.float32, start="row")
    it = _C.Product(case.result, case.a, case.b, case.start, "", case.list)
    assert str(it) == "listed rows, product, 3 x 4 x 5 of float32, added to\n"
    it = _C.Product(case.result, case.a, case.b, rows=list_of(torch.arange(4), 4), sums=True)
    assert str(it) == "sums over listed rows, product, 3 x 4 x 5 of float32\n"


class TestErrors:
    def operands(self):
        return torch.empty(3, 5), torch.empty(3, 4), torch.empty(4, 5)

    @pytest.mark.parametrize(
        ("rows", "sums", "words"),
        [
            (torch.zeros(3, dtype=torch.int64), False, "got 3 int64, want 4 int64"),
            (torch.zeros(4, dtype=torch.int64), True, "got 4 int64, want 5 int64"),
            (torch.zeros(4, dtype=torch.int32), False, "got 4 int32, want 4 int64"),
            (torch.zeros(8, dtype=torch.int64)[::2], False, "want 4 int64 one after the other"),
        ],
    )
    def test_layouts_of_lists(self, rows, sums, words):
        with pytest.raises(_C.InternalError, match=words):
            _C.Product(*self.operands(), rows=rows, sums=sums)

    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ([4, 0, 1, 2], "rows: got 4 of them, want 0 to 3"),
            ([-1, 0, 1, 2], "rows: got -1 of them, want 0 to 3"),
            ([2, 0, 3, 0], "rows: got 3 at 1, want 1 or more, and less than 3"),
            ([2, 1, 1, 0], "rows: got 1 at 1, want 2 or more, and less than 3"),
            ([1, -1, 1, 2], "rows: got -1 at 0, want 0 or more, and less than 3"),
        ],
    )
    def test_lists_that_name_no_rows(self, rows, words):
        with pytest.raises(IndexError, match=words):
            _C.Product(*self.operands(), rows=torch.tensor(rows)).run()

    def test_batches(self):
        batch = torch.empty(2, 3, 3)
        with pytest.raises(_C.InternalError, match="got a result of 3 dims, want 2"):
            _C.Product(batch, batch, batch, rows=torch.zeros(4, dtype=torch.int64))

    def test_files(self):
        case = Case((3, 4, 5), torch.tensor([1]), False, torch.float32)
        case.list = case.list[:3]
        with pytest.raises(torch_ort.UserError, match="file: node 'y': rows: got 3 int64, want 4"):
            run_graph(case)
