"""The gradient of an embedding by the kernels of a GPU, against sums in float64."""

from __future__ import annotations

import embedding_cases
import golden
import pytest
import regions
import torch
from embedding_cases import CASES, Case, drawn
from emulated import cuda_device
from emulated.cuda_driver import ORDERS
from gate import compile_texts, faults
from hypothesis import given, settings
from hypothesis import strategies as st
from sorted_sums import launches_of, run, run_with_wide_columns, texts_of
from torch.nn import functional as F

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.cuda
emulated = pytest.mark.skipif(not cuda_device.is_active(), reason="of the emulator")


@pytest.mark.parametrize("name", CASES)
def test_sums(name: str) -> None:
    got = run(CASES[name])
    assert got.dtype == CASES[name].dtype


@pytest.mark.parametrize("dtype", regions.REAL, ids=str)
@pytest.mark.parametrize("of_ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (0,), (5, 3), (2, 3, 4), (0, 3), ()], ids=str)
def test_dtypes_and_shapes(shape, of_ids, dtype) -> None:
    ids = drawn(int(torch.Size(shape).numel()), 7).view(shape).to(of_ids)
    run(Case(ids, 7, 8, dtype, padding=3))


@pytest.mark.parametrize(
    "case",
    [Case(drawn(70_000, 6), 6, 161), Case(drawn(300_000, 500), 500, 1)],
    ids=["strips of several lines", "blocks of several tiles"],
)
def test_many_ids(case) -> None:
    """So many that blocks have more work, rather than that there are more blocks."""
    run(case)


def direct(rows: int, columns: int, space: int) -> _C.Graph:
    """Give the engine's node for two ids, with so many bytes of workspace."""
    return regions.read(
        {"x": f"float[2,{columns}]", "ids": "int64[2]"},
        ["y, space = torch_ort.EmbeddingGrad (x, ids)"],
        ["y"],
        types={"y": f"float[{rows},{columns}]", "space": f"uint8[{space}]"},
    )


@pytest.mark.parametrize("sizes", [(5, 0), (0, 4), (0, 0)], ids=str)
def test_empty_tables(sizes) -> None:
    rows, columns = sizes
    space = 4 * 512 + 4 * 4 * 2
    compiled = regions.Compiled(direct(rows, columns, space), regions.CUDA)
    given = {"x": torch.randn(2, columns), "ids": torch.tensor([1, 0])}
    assert compiled.run(given)["y"].shape == sizes
    if rows == 0:  # no id is a row of such a table
        with pytest.raises(IndexError, match=Case.words):
            compiled.run(given)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2500),
    st.sampled_from([1, 2, 8, 9, 511, 512, 513]),
    st.sampled_from([1, 3, 4, 6, 8, 40]),
    st.sampled_from(regions.REAL),
    st.integers(-2, 10),
    st.integers(0, 2**31),
)
def test_any_sizes(count, rows, columns, dtype, padding, seed) -> None:
    """Each combination is one more run of texts that have been compiled."""
    ids = drawn(count, rows, seed)
    permutation = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    run(Case(permutation[ids], rows, columns, dtype, padding))


def test_special_numbers_stay_in_their_rows() -> None:
    case = Case(torch.tensor([2, 0, 2, 3]), 5, 4)
    given = case.given()
    given["x"][0, 1], given["x"][1, 0] = torch.inf, torch.nan
    got = regions.run_by_name(case.graph(), given, regions.CUDA)["y"]
    assert got.isnan().nonzero().tolist() == [[0, 0]]
    assert got.isinf().nonzero().tolist() == [[2, 1]]


@emulated
@pytest.mark.parametrize("name", ["parts", "blocks", "bfloat16"])
def test_same_bits_in_any_order_of_threads(name, monkeypatch) -> None:
    results = []
    for order in ORDERS:
        monkeypatch.setenv("EMULATED_CUDA_ORDER", order)
        results.append(run(CASES[name]))
    assert len(results) > 3
    assert all(torch.equal(each, results[0]) for each in results)


def in_order(rows: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def in_lines(rows: list[torch.Tensor]) -> torch.Tensor:
    return in_order([in_order(rows[line::8]) for line in range(min(8, len(rows)))])


@pytest.mark.parametrize("count", [2, 8, 9, 20, 128, 129, 1000, 1024, 1025])
def test_order_of_a_sum(count) -> None:
    """Bit for bit: up to 8 rows as they come, up to 128 in 8 lines, and more in parts."""
    ids = torch.cat([torch.arange(5), torch.full((count,), 3), drawn(2 * count, 5)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(count))]
    ids[ids == 3] += (ids == 3).cumsum(0)[ids == 3] > count  # so many and no more
    case = Case(ids, 7, 12)
    given = case.given()
    given["x"] *= 10 ** torch.linspace(-3, 3, len(ids))[:, None]
    rows = list(given["x"][ids == 3])
    assert len(rows) == count
    if count <= 8:
        want = in_order(rows)
    elif count <= 128:
        want = in_lines(rows)
    else:
        want = in_lines([in_lines(rows[i : i + 128]) for i in range(0, count, 128)])
    got = regions.run_by_name(case.graph(), given, regions.CUDA)["y"]
    assert torch.equal(got[3], want)


@pytest.mark.parametrize("count", [1, 8, 9, 128, 129, 1000])
def test_a_sum_depends_on_its_rows_alone(count) -> None:
    """Neither on what lies between them, nor on other ids, nor on the size of the table."""
    x = torch.randn(count, 12)
    results = []
    for rows, before, others in ((9, 0, 0), (9, 3, 700), (600, 77, 2100)):
        ids = torch.cat([torch.arange(before) % 4, torch.full((count,), 5), drawn(others, 5)])
        case = Case(ids, rows, 12)
        given = {"x": torch.cat([torch.randn(before, 12), x, torch.randn(others, 12)]), "ids": ids}
        results.append(regions.run_by_name(case.graph(), given, regions.CUDA)["y"][5])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ---- as a part of compiled functions


def embed(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, weight)


def gradient(call, weight: torch.Tensor, ids: torch.Tensor, *others) -> torch.Tensor:
    leaf = weight.clone().requires_grad_()
    (call(leaf, ids, *others) * 3).sum().backward()
    return leaf.grad


# What comes after an embedding, so that the gradient of its rows lies in another way.
LAYOUTS = {
    "contiguous": lambda rows: rows.sin(),
    "expanded": lambda rows: rows.sum((0, 2)).sin(),
    "transposed": lambda rows: rows.transpose(0, 2).matmul(rows.new_ones(4, 3)).sin(),
    "strided": lambda rows: torch.stack([rows, rows.cos()], -1).sin(),
    "sliced": lambda rows: torch.cat([rows, rows.new_ones(4, 3, 8)], 1).sin(),
    "sliced columns": lambda rows: torch.cat([rows.new_ones(4, 5, 1), rows], 2).sin(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_any_layout(name, dtype) -> None:
    def call(weight, ids):
        return LAYOUTS[name](F.embedding(ids, weight))

    torch.manual_seed(0)
    weight, ids = torch.randn(11, 8, dtype=dtype, device="cuda"), torch.randint(0, 11, (4, 5))
    got = gradient(torch.compile(call, backend="ort"), weight, ids.cuda())
    want = gradient(call, weight.double(), ids.cuda())
    assert torch_ort.counters()["fallbacks"] == 0
    torch.testing.assert_close(got, want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_begin_anywhere(dtype) -> None:
    """As a part of a flat buffer, at an address that no vector has."""
    ids, flat = torch.randint(0, 11, (4, 5)), torch.randn(1 + 4 * 5 * 8).to(dtype).cuda()
    leaf = torch.randn(11, 8).to(dtype).cuda().requires_grad_()
    torch.compile(embed, backend="ort")(leaf, ids.cuda()).backward(flat[1:].view(4, 5, 8))
    want = embedding_cases.sums(flat[1:].view(4, 5, 8).cpu(), ids, 11)
    torch.testing.assert_close(leaf.grad.cpu(), want.to(dtype))


def test_ids_of_any_layout() -> None:
    call = torch.compile(embed, backend="ort")
    for shape in ((3, 5), (4, 9), (7, 2)):
        weight, ids = torch.randn(11, 6).cuda(), torch.randint(0, 11, shape).cuda().t()
        torch.testing.assert_close(gradient(call, weight, ids), gradient(embed, weight, ids))


def test_it_is_the_engines_kernel() -> None:
    layer = torch.nn.Embedding(10, 4, padding_idx=2).cuda().bfloat16()
    ids = torch.randint(0, 10, (3, 5)).cuda()
    graph = torch_ort.explain(layer, ids).graphs[0]
    assert graph.nodes["torch_ort.EmbeddingGrad"] == 1
    assert "aten::embedding_dense_backward" not in graph.aten


def test_new_sizes_compile_nothing() -> None:
    weight = torch.randn(40, 8).cuda().requires_grad_()
    call = torch.compile(embed, backend="ort", dynamic=True)

    def step(count: int) -> None:
        call(weight, drawn(count, 40).cuda()).sin().sum().backward()
        torch.cuda.synchronize()

    for count in (5, 3000):
        step(count)
    before = _C.cuda.build_counts()
    for count in (8, 700, 2500):
        step(count)
    assert _C.cuda.build_counts() == before


@pytest.mark.parametrize("check", [0, 2])
def test_an_id_out_of_bounds(check) -> None:
    """Nobody waits for the kernel that finds it, unless each step is waited for."""
    case = CASES["an id behind"]
    good = case.given() | {"ids": drawn(60, 20)}
    compiled = regions.Compiled(case.graph(), regions.CUDA, synchronize=check == 2)
    if check == 0:
        case.compare(compiled.run(case.given()), case.wanted())
    with pytest.raises(IndexError, match=Case.words):
        compiled.run(good if check == 0 else case.given())
    compiled.run(good)


def test_workspaces_that_do_not_fit() -> None:
    given = {"x": torch.randn(2, 3), "ids": torch.tensor([1, 0])}
    with pytest.raises(_C.InternalError, match="EmbeddingGrad: the workspace does not fit"):
        regions.run_by_name(direct(5, 3, 100), given, regions.CUDA)


# ---- launches and machine code


@emulated
def test_launches(tmp_path, monkeypatch, request) -> None:
    names = ("few", "tiles", "blocks", "three digits", "parts", "strips")
    launches = launches_of(CASES, names, tmp_path, monkeypatch)
    accept = request.config.getoption("--accept")
    golden.compare("embedding_grad.launches", launches, accept)


@emulated
@pytest.mark.parametrize("name", ["strips", "parts", "single columns"])
def test_columns_that_32_bits_cannot_count(name, tmp_path, monkeypatch) -> None:
    run_with_wide_columns(CASES[name], tmp_path, monkeypatch)


# The name of a text, and how many instructions at least read and write 16 bytes. Four rows are read
# at once.
WIDE = {
    "sort_i64": (0, 0), "sort_i32": (0, 0), "float_4": (16, 2), "bf16_8": (16, 2), "f16_8": (16, 2),
    "double_2": (16, 2), "bf16_1": (0, 0), "float_4_dims": (16, 2),
}  # fmt: skip


def test_good_machine_code(tmp_path, monkeypatch) -> None:
    """No spill and no local memory, and accesses of 16 bytes."""
    texts = {}
    for name in ("few", "int32", "bfloat16", "float16", "float64", "single columns"):
        texts |= texts_of(CASES[name], tmp_path / name)
    monkeypatch.setenv("TORCH_ORT_DUMP", "cuda")
    monkeypatch.setenv("TORCH_ORT_DUMP_DIR", str(tmp_path))
    weight, ids = torch.randn(11, 8).cuda(), torch.randint(0, 11, (4, 5)).cuda()
    sliced = torch.compile(lambda w, i: LAYOUTS["sliced"](embed(w, i)), backend="ort")
    gradient(sliced, weight, ids)
    texts |= {path.stem: path.read_text() for path in tmp_path.rglob("sorted_sums_*_dims.cu")}
    texts = {name.removeprefix("sorted_sums_"): text for name, text in texts.items()}
    assert texts.keys() == WIDE.keys()
    for built in compile_texts(texts):
        assert faults(built, *WIDE[built.name]) == []
