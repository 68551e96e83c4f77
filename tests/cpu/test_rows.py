"""Reductions and labels of regions: sums along rows, over rows and over everything, extremes along
rows, class labels; rows shorter and much longer than a tile, few of them and many.
"""

from __future__ import annotations

import itertools
import re

import pytest
import regions
import torch
from regions import ISAS, assert_near

from torch_ort import _C

SIZES = [
    (1, 1), (3, 1), (1, 3), (7, 3), (1000, 3), (200, 8), (5, 100), (300, 100), (129, 1024),
    (2, 2048), (2, 2049), (3, 5000), (40, 5000), (1, 70000), (4, 70000), (70000, 2),
]  # fmt: skip
REDUCE = {
    "ReduceSum": torch.sum, "ReduceMean": torch.mean, "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
}  # fmt: skip


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def of_sum(x: torch.Tensor, count: int) -> float:
    """Give what sums of so many numbers may be off by, relative and absolute."""
    return max(regions.TOLERANCE[x.dtype], torch.finfo(x.dtype).eps * count**0.5)


def row_graph(dtype: torch.dtype) -> _C.Graph:
    """Write all reductions along rows, what follows them, and sums over rows of all kinds."""
    nodes = ["a = Neg (x)"]
    for op in REDUCE:
        nodes += [f"r{op} = {op} (a, last)", f"k{op} = {op} <keepdims = 0> (a, last)"]
    nodes += [
        "c = Sub (a, rReduceMax)",
        "e = Exp (c)",
        "s = ReduceSum (e, last)",
        "p = Div (e, s)",
        "column = ReduceSum <keepdims = 0> (p, first)",
        "kept = ReduceSum (a, first)",
        "total = ReduceSum <keepdims = 0> (a)",
        "rows = ReduceSum <keepdims = 0> (s)",
    ]
    outputs = [name + op for op in REDUCE for name in "rk"]
    outputs += ["p", "column", "kept", "total", "rows"]
    constants = ["int64[1] last = {-1}", "int64[1] first = {0}"]
    graph = regions.read({"x": regions.type_text(dtype, ["N", "C"])}, nodes, outputs, constants)
    return regions.fused(graph)


ROWS = {dtype: row_graph(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)}


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", ROWS, ids=regions.NAMES.get)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reductions(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    x = numbers(*sizes, dtype=dtype)
    a = -x.double()
    for isa in ISAS:
        got = regions.run_by_name(ROWS[dtype], {"x": x}, isa)
        for op, reduce in REDUCE.items():
            near = of_sum(x, sizes[1])
            assert_near(got[f"r{op}"], reduce(a, -1, keepdim=True), near, 4 * near)
            assert_near(got[f"k{op}"], reduce(a, -1), near, 4 * near)
        p = a.softmax(-1)
        near = of_sum(x, sum(sizes))
        assert_near(got["p"], p, of_sum(x, sizes[1]), atol=1e-7)
        assert_near(got["column"], p.sum(0), near)
        root = a.abs().sum(0).amax() ** 0.5 if x.numel() else 1
        assert_near(got["kept"], a.sum(0, keepdim=True), near, atol=near * root)
        assert_near(got["total"], a.sum(), near, atol=near * a.abs().sum() ** 0.5)
        assert_near(got["rows"], (a - a.amax(-1, keepdim=True)).exp().sum(), near)


@regions.also_on_cuda
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_without_rows_or_columns(sizes: tuple[int, int]) -> None:
    for dtype, isa in itertools.product(ROWS, ISAS):
        got = regions.run_by_name(ROWS[dtype], {"x": numbers(*sizes, dtype=dtype)}, isa)
        rows, columns = sizes
        assert torch.equal(got["kReduceSum"], torch.zeros(rows, dtype=dtype))
        assert got["rReduceMean"].isnan().all()
        assert got["p"].shape == sizes
        assert torch.equal(got["kept"], torch.zeros(1, columns, dtype=dtype))
        assert got["total"] == 0
        assert got["rows"] == 0


LAST_AXES = [
    ([2, 3, 4, 5], [3]), ([2, 3, 4, 5], [2, 3]), ([2, 3, 4, 5], [1, 2, 3]), ([6, 4, 1], [1, 2]),
    ([6, 1, 4], [2]), ([2, 30, 40, 50], [2, 3]),
]  # fmt: skip


@regions.also_on_cuda
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), LAST_AXES, ids=str)
def test_several_last_axes(shape: list[int], axes: list[int], keepdims: int) -> None:
    text = ", ".join(str(axis - len(shape)) for axis in axes)
    x = numbers(*shape)
    for op, reduce in REDUCE.items():
        graph = regions.read(
            {"x": regions.type_text(torch.float32, shape)},
            ["a = Neg (x)", f"y = {op} <keepdims = {keepdims}> (a, axes)"],
            ["y"],
            [f"int64[{len(axes)}] axes = {{{text}}}"],
        )
        for isa, layout in itertools.product(ISAS, (x, x.transpose(0, 1).contiguous().mT.mT)):
            source = layout if layout.shape == x.shape else x
            (y,) = regions.run(regions.fused(graph), {"x": source}, isa)
            assert_near(y, reduce(-x.double(), axes, keepdim=bool(keepdims)), of_sum(x, x.numel()))


@regions.also_on_cuda
@pytest.mark.parametrize("axes", [[0], [0, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_several_first_axes(axes: list[int], keepdims: int) -> None:
    text = ", ".join(map(str, axes))
    graph = regions.read(
        {"x": "float[A,B,C,D]"},
        ["a = Neg (x)", f"y = ReduceSum <keepdims = {keepdims}> (a, axes)"],
        ["y"],
        [f"int64[{len(axes)}] axes = {{{text}}}"],
    )
    for isa, shape in itertools.product(ISAS, ([2, 3, 4, 5], [20, 1, 30, 7], [1, 1, 1, 3])):
        x = numbers(*shape)
        (y,) = regions.run(regions.fused(graph), {"x": x}, isa)
        assert_near(y, (-x.double()).sum(axes, keepdim=bool(keepdims)), of_sum(x, x.numel()))


MIDDLE_AXES = [
    ([2, 3, 5], [1]), ([2, 3, 4, 5], [1]), ([2, 3, 4, 5], [2]), ([2, 3, 4, 5], [1, 2]),
    ([6, 70, 33], [1]), ([3, 5000, 2], [1]), ([100, 4, 7], [1]), ([1, 9, 4], [1]), ([5, 1, 4], [1]),
    ([2, 3, 1], [1]), ([7, 40, 2000], [1]), ([0, 3, 4], [1]), ([3, 0, 4], [1]), ([3, 4, 0], [1]),
]  # fmt: skip


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), MIDDLE_AXES, ids=str)
def test_axes_between_others(
    shape: list[int], axes: list[int], keepdims: int, dtype: torch.dtype
) -> None:
    """Rows are added up in groups of them, beside numbers that belong to a group."""
    text = ", ".join(map(str, axes))
    dims = [*"ABCD"][: len(shape)]
    small = [1 if i in axes else dim for i, dim in enumerate(dims)]
    graph = regions.fused(
        regions.read(
            {"x": regions.type_text(dtype, dims), "z": regions.type_text(dtype, small)},
            [
                "a = Mul (x, z)",
                f"y = ReduceSum <keepdims = {keepdims}> (a, axes)",
                "b = Tanh (a)",
                "t = ReduceSum <keepdims = 0> (b, axes)",
            ],
            ["y", "b", "t"],
            [f"int64[{len(axes)}] axes = {{{text}}}"],
        )
    )
    x = numbers(*shape, dtype=dtype)
    z = numbers(*(1 if i in axes else size for i, size in enumerate(shape)), dtype=dtype)
    for isa in ISAS:
        y, b, t = regions.run(graph, {"x": x, "z": z}, isa)
        a = x.double() * z.double()
        near = of_sum(x, x.numel())
        assert_near(y, a.sum(axes, keepdim=bool(keepdims)), near, 4 * near)
        assert_near(b, a.tanh(), atol=2e-6)
        assert_near(t, a.tanh().sum(axes), near, 4 * near)


def test_sums_over_other_groups_are_regions_of_their_own() -> None:
    graph = regions.read(
        {"x": "float[A,B,C]"},
        ["a = Tanh (x)", "y = ReduceSum (a, rows)", "z = ReduceSum (a, all)"],
        ["y", "z"],
        ["int64[1] rows = {1}", "int64[2] all = {0, 1}"],
    )
    x = numbers(3, 40, 7)
    y, z = regions.run(regions.fuse(graph), {"x": x})
    assert_near(y, x.double().tanh().sum(1, keepdim=True), 1e-5)
    assert_near(z, x.double().tanh().sum((0, 1), keepdim=True), 1e-5)


@regions.also_on_cuda
@pytest.mark.parametrize("layout", ["transposed", "every other", "expanded"])
def test_reductions_of_what_does_not_lie_in_rows(layout: str) -> None:
    x = numbers(30, 50)
    x = {
        "transposed": numbers(50, 30).mT,
        "every other": x[:, ::2],
        "expanded": x[:1].expand(30, 50),
    }[layout]
    for isa in ISAS:
        got = regions.run_by_name(ROWS[torch.float32], {"x": x}, isa)
        a = -x.double()
        assert_near(got["kReduceSum"], a.sum(-1), of_sum(x, 50))
        assert_near(got["p"], a.softmax(-1), of_sum(x, 50))
        assert_near(got["kept"], a.sum(0, keepdim=True), of_sum(x, 50))


@regions.also_on_cuda
@pytest.mark.parametrize("columns", [1, 3, 17, 64, 100, 5000])
def test_nan_and_infinity_in_extremes(columns: int) -> None:
    for isa, place in itertools.product(ISAS, {0, columns // 2, columns - 1}):
        x = numbers(5, columns)
        x[1, place], x[2, place], x[3, place] = torch.nan, torch.inf, -torch.inf
        x[4] = torch.inf
        got = regions.run_by_name(ROWS[torch.float32], {"x": x}, isa)
        for op in ("ReduceMax", "ReduceMin", "ReduceSum"):
            want = REDUCE[op](-x.double(), -1)
            assert_near(got[f"k{op}"], want, of_sum(x, columns))


@pytest.mark.parametrize("sizes", [(70000, 2), (9000, 40), (300, 5000), (4, 70000)], ids=str)
def test_sums_are_the_same_for_any_number_of_threads(sizes: tuple[int, int]) -> None:
    for dtype, graph in ROWS.items():
        x = numbers(*sizes, dtype=dtype)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(regions.run(graph, {"x": x}))
        for again in results[1:]:
            for got, want in zip(again, results[0], strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("sizes", [(2000000, 3), (3, 2000000), (2000000, 1)], ids=str)
def test_sums_of_many_equal_numbers_stay_exact_enough(sizes: tuple[int, int]) -> None:
    """Where each addition is rounded the same way, errors do not cancel."""
    x = torch.full(sizes, 0.1)
    got = _C.run(ROWS[torch.float32], {"x": x})
    # Chunks of a row are added one after the other.
    assert_near(got["kReduceSum"], -x.double().sum(-1), 2e-5)
    assert_near(got["kept"], -x.double().sum(0, keepdim=True), 1e-5)
    assert_near(got["total"], -x.double().sum(), 2e-5)


# ---- labels


def label_graph(dtype: str = "float", ignore: str = "ignore_index = -100") -> _C.Graph:
    attrs = f"<{ignore}>" if ignore else ""
    nodes = [
        "a = Neg (x)",
        f"picked = torch_ort.RowPick {attrs} (a, label)",
        f"valid = torch_ort.RowValid {attrs} (label)",
        "more = Add (picked, valid)",
        f"back = torch_ort.RowScatter {attrs} (label, more)",
        "sum = ReduceSum <keepdims = 0> (picked)",
        "count = ReduceSum <keepdims = 0> (valid)",
        "y = Add (back, a)",
    ]
    types = dict.fromkeys(("picked", "valid", "more"), f"{dtype}[N]")
    types["back"] = f"{dtype}[N,C]"
    graph = regions.read(
        {"x": f"{dtype}[N,C]", "label": "int64[N]"}, nodes,
        ["y", "picked", "valid", "sum", "count"], types=types,
    )  # fmt: skip
    return regions.fused(graph)


def labels(rows: int, columns: int, ignored: int | None) -> torch.Tensor:
    label = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(rows))
    label[-1] = columns - 1
    if ignored is not None:
        label[::3] = ignored
    return label


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ignored", [-100, 0, 2, None])
@pytest.mark.parametrize(
    "sizes", [(1, 3), (70, 3), (5, 100), (300, 100), (6, 5000), (3, 70000)], ids=str
)
def test_labels(sizes: tuple[int, int], ignored: int | None, dtype: torch.dtype) -> None:
    ignore = "" if ignored is None else f"ignore_index = {ignored}"
    graph = label_graph(regions.NAMES[dtype], ignore)
    x, label = numbers(*sizes, dtype=dtype), labels(*sizes, ignored)
    valid = torch.ones_like(label, dtype=torch.bool) if ignored is None else label != ignored
    a, index = -x.double(), label.where(valid, 0)[:, None]
    picked = a.gather(1, index)[:, 0].where(valid, 0.0)
    want = a + torch.zeros_like(a).scatter(1, index, (picked + valid)[:, None])
    for isa in ISAS:
        got = regions.run_by_name(graph, {"x": x, "label": label}, isa)
        assert_near(got["picked"], picked)
        assert torch.equal(got["valid"], valid.to(dtype))
        assert_near(got["y"], want)
        assert_near(got["sum"], picked.sum(), of_sum(x, sizes[0]), 1e-5)
        assert got["count"] == valid.sum()


@regions.also_on_cuda
@pytest.mark.parametrize("ignored", [-100, None])
@pytest.mark.parametrize("label", [7, -1, 100, -(2**40), 2**24 + 2])
def test_labels_out_of_range(label: int, ignored: int | None) -> None:
    graph = label_graph("float", "" if ignored is None else f"ignore_index = {ignored}")
    for isa, rows in itertools.product(ISAS, (1, 40, 3000)):
        given = {"x": numbers(rows, 7), "label": torch.full([rows], 3)}
        given["label"][rows // 2] = label
        if isa == regions.CUDA:  # nobody waits for the kernel: the next call raises
            got, words = regions.run_by_name(graph, given, isa), "Target is out of bounds"
            assert got["picked"].isnan().tolist() == [row == rows // 2 for row in range(rows)]
        else:
            words = re.escape(f"Target {label} is out of bounds.")
        with pytest.raises(IndexError, match=words):
            regions.run_by_name(graph, given, isa)
    given["label"][rows // 2] = 6
    _C.run(graph, given)  # and the next call is as if nothing had been


@regions.also_on_cuda
def test_scatter_of_one_number() -> None:
    """As the backward half of a loss that is a sum."""
    graph = regions.fused(
        regions.read(
            {"label": "int64[N]", "g": "float", "p": "float[N,C]"},
            ["s = torch_ort.RowScatter <ignore_index = -100> (label, g)", "y = Sub (p, s)"],
            ["y"],
            types={"s": "float[N,C]"},
        )
    )
    for isa, sizes in itertools.product(ISAS, ((5, 7), (1, 1), (3, 5000))):
        p, g, label = numbers(*sizes), torch.tensor(0.5), labels(*sizes, -100)
        want = p.double().clone()
        for row, column in enumerate(label.tolist()):
            if column >= 0:
                want[row, column] -= 0.5
        (y,) = regions.run(graph, {"label": label, "g": g, "p": p}, isa)
        assert_near(y, want)


@regions.also_on_cuda
def test_labels_alone_compute_in_the_dtype_of_their_numbers() -> None:
    graph = regions.fused(
        regions.read(
            {"label": "int64[N]", "g": "double[N]"},
            [
                "back = torch_ort.RowScatter <ignore_index = -100> (label, g)",
                "picked = torch_ort.RowPick <ignore_index = -100> (back, label)",
            ],
            ["back", "picked"],
            types={"picked": "double[N]", "back": "double[N,4]"},
        )
    )
    g, label = torch.tensor([0.1, 0.2, 1 / 3], dtype=torch.float64), torch.arange(3)
    for isa in ISAS:
        back, picked = regions.run(graph, {"label": label, "g": g}, isa)
        assert torch.equal(picked, g)
        assert torch.equal(back[:, :3], g.diag())


# ---- memory of inputs that die


@regions.also_on_cuda
def test_a_row_result_of_one_column_spares_what_is_read_later() -> None:
    """With a single column rows are as large as the whole: `s` may not take the place of `x`."""
    constants = ["int64[1] last = {-1}"]
    graph = regions.read(
        {"u": "float[N,K]", "w": "float[K,C]"},
        [
            "x = MatMul (u, w)",
            "m = ReduceMean (x, last)",
            "z = Add (x, m)",
            "s = ReduceSum (x, last)",
            "s2 = Add (s, m)",
            "t = ReduceSum (z, last)",
        ],
        ["s2", "t"],
        constants,
    )
    fused = regions.fuse(graph)
    assert regions.ops(fused) == ["MatMul", "Region"]
    for columns, isa in itertools.product((1, 5), ISAS):
        u, w = numbers(6, 3), numbers(3, columns)
        s2, t = regions.run(fused, {"u": u, "w": w}, isa)
        x = u.double() @ w.double()
        m = x.mean(-1, keepdim=True)
        assert_near(s2, x.sum(-1, keepdim=True) + m, 1e-5)
        assert_near(t, (x + m).sum(-1, keepdim=True), 1e-5)


# ---- random masks


@regions.also_on_cuda
def test_a_mask_of_rows_differs_from_row_to_row() -> None:
    graph = regions.fused(
        regions.read(
            {"x": "float[N,C]", "seed": "int64"},
            [
                "mask = torch_ort.PhiloxMask <keep = 0.5, stream = 3> (seed)",
                "kept = Cast <to = 1> (mask)",
                "y = Mul (x, kept)",
                "z = Neg (y)",
            ],
            ["z"],
            types={"mask": "bool[N,1]"},
        )
    )
    for sizes, isa in itertools.product(((64, 10), (40, 3000)), ISAS):
        (z,) = regions.run(graph, {"x": torch.ones(sizes), "seed": torch.tensor(5)}, isa)
        assert torch.equal(z, z[:, :1].expand(sizes))
        assert 0 < (z != 0).sum() < z.numel()


def test_sums_over_no_rows_of_a_stretched_operand() -> None:
    types = {"x": "double[A,B,C]", "z": "double[A,1,C]"}
    nodes = ["a = Sub (x, z)", "b = Tanh (a)", "y = ReduceSum <keepdims = 0> (b, rows)"]
    graph = regions.fused(regions.read(types, nodes, ("y",), ["int64[2] rows = {0, 1}"]))
    inputs = {"x": torch.zeros(0, 3, 5).double(), "z": torch.zeros(0, 1, 5).double()}
    (got,) = regions.run(graph, inputs)
    assert torch.equal(got, torch.zeros(5).double())
