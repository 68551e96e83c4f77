"""The gradient of places along one dim by the kernels of a GPU, against sums in float64."""

from __future__ import annotations

import golden
import pytest
import regions
import take_cases
import torch
from embedding_cases import drawn
from emulated import cuda_device
from emulated.cuda_driver import ORDERS
from gate import compile_texts, faults
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import numbers
from sorted_sums import launches_of, run, run_with_wide_columns, texts_of
from take_cases import CASES, Case, mixed

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.cuda
emulated = pytest.mark.skipif(not cuda_device.is_active(), reason="of the emulator")


@pytest.mark.parametrize("name", CASES)
def test_sums(name: str) -> None:
    got = run(CASES[name])
    assert got.dtype == CASES[name].dtype


SHAPES = {
    "one dim": ((7,), 0), "rows": ((9, 5), 0), "columns": ((5, 9), 1), "within": ((2, 3, 4, 5), 2),
    "no others": ((0, 6), 1), "one": ((3, 1, 2), 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", regions.REAL, ids=str)
@pytest.mark.parametrize("of_places", [(6,), (2, 3), (0,), (), (40,)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_dtypes_and_shapes(name, of_places, dtype) -> None:
    shape, axis = SHAPES[name]
    places = mixed(int(torch.Size(of_places).numel()), shape[axis]).view(of_places)
    run(Case(places, shape, axis, dtype))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2100),
    st.sampled_from([1, 2, 9, 33, 513]),
    st.lists(st.sampled_from([1, 2, 3, 8]), max_size=3),
    st.sampled_from([1, 3, 4, 8, 40]),
    st.integers(0, 4),
    st.sampled_from(regions.REAL),
)
@example(259, 1, [], 1, 0, torch.float32)  # one sum, most of which cancels
@example(996, 1, [3, 8, 8], 3, 0, torch.float16)  # a sum half-way between two halves
def test_any_sizes(count, size, outer, inner, axis, dtype) -> None:
    """Each combination is one more run of texts that have been compiled."""
    others = [*outer, inner]
    axis = min(axis, len(others))
    run(Case(mixed(count, size), (*others[:axis], size, *others[axis:]), axis, dtype))


@emulated
@pytest.mark.parametrize("name", ["taken often", "taken columns often", "taken bfloat16"])
def test_same_bits_in_any_order_of_threads(name, monkeypatch) -> None:
    results = []
    for order in ORDERS:
        monkeypatch.setenv("EMULATED_CUDA_ORDER", order)
        results.append(run(CASES[name]))
    assert len(results) > 3
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("count", [3, 9, 129, 1000])
def test_a_sum_depends_on_its_parts_alone(count) -> None:
    """Neither on what lies between them, nor on the other dims."""
    x, results = torch.randn(count, 12), []
    for shape, axis, others in (((9, 12), 0, 0), ((2, 9, 12), 1, 700), ((12, 600), 1, 90)):
        places = torch.cat([torch.full((count,), 5), drawn(others, 5)])
        parts = torch.cat([x, torch.randn(others, 12)])
        parts = (
            parts.t().contiguous()
            if axis == len(shape) - 1
            else parts.expand(*shape[:axis], -1, 12)
        )
        given = {"x": parts, "places": places}
        got = regions.run_by_name(Case(places, shape, axis).graph(), given, regions.CUDA)["y"]
        results.append(got.select(axis, 5).reshape(-1, 12)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def direct(shape: str, strides: str, places: int, space: int) -> _C.Graph:
    """Give the engine's node for places along the second dim, with so many bytes of workspace."""
    rows = shape.split(",")[0]
    return regions.read(
        {"x": f"float[{rows},{places}]", "places": f"int64[{places}]"},
        ["y, space = torch_ort.TakeGrad <axis = 1, from_end = 1> (x, places)"],
        ["y"],
        types={"y": f"float[{shape}]", "space": f"uint8[{space}]"},
        strides={"y": strides},
    )


def test_results_of_any_layout() -> None:
    x, places = torch.randn(4, 3), torch.tensor([4, 0, -1])
    graph = direct("4,5", "[1,4]", 3, 4 * 512 + 4 * 4 * 3)
    got = regions.run_by_name(graph, {"x": x, "places": places}, regions.CUDA)["y"]
    assert got.stride() == (1, 4)
    regions.assert_near(got, take_cases.sums(x, places, (4, 5), 1))


def test_workspaces_that_do_not_fit() -> None:
    given = {"x": torch.randn(4, 3), "places": torch.tensor([1, 0, 2])}
    with pytest.raises(_C.InternalError, match="TakeGrad: the workspace does not fit"):
        regions.run_by_name(direct("4,5", "[5,1]", 3, 100), given, regions.CUDA)


@pytest.mark.parametrize("check", [0, 2])
def test_a_place_out_of_bounds(check) -> None:
    """Nobody waits for the kernel that finds it, unless each step is waited for."""
    case = CASES["a place behind"]
    good = case.given() | {"places": mixed(60, 20)}
    compiled = regions.Compiled(case.graph(), regions.CUDA, synchronize=check == 2)
    if check == 0:
        case.compare(compiled.run(case.given()), case.wanted())
    with pytest.raises(IndexError, match=Case.words):
        compiled.run(good if check == 0 else case.given())
    compiled.run(good)


# ---- as a part of compiled functions


def gradients(call, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    taken = call(leaf, places)
    taken.backward(numbers(*taken.shape, dtype=torch.bfloat16).to(x.dtype).cuda())
    return leaf.grad


CALLS = {
    "columns": (lambda x, places: x[:, places], (4, 8)),
    "rows": (lambda x, places: x[places], (8, 4)),
    "within": (lambda x, places: x[:, places], (3, 8, 5)),
    "transposed": (lambda x, places: x.t()[places], (4, 8)),
    "select": (lambda x, places: x.index_select(2, places.abs()), (2, 3, 8, 4)),
    "select columns": (lambda x, places: x.index_select(1, places.abs()), (4, 8)),
    "two dims": (lambda x, places: x[:, places.view(2, -1)], (4, 8)),
    "expanded": (lambda x, places: x[:, places].sum((0, 1)), (4, 8, 3)),
    "sliced": (lambda x, places: torch.cat([x, x[:, places]], 1), (4, 8, 4)),
    "heads": (
        lambda x, places: x[:, places].transpose(1, 2).matmul(x.new_ones(4, 3)),
        (2, 8, 3, 4),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_against_eager_in_float64(name, dtype) -> None:
    call, shape = CALLS[name]
    places = (mixed(6, 7) if "select" not in name else drawn(6, 7)).cuda()
    x = torch.randn(shape).to(dtype).cuda()
    got = gradients(torch.compile(call, backend="ort"), x, places)
    want = gradients(call, x.double(), places)
    rtol = 6e-2 if dtype.itemsize == 2 else 2e-5
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol)
    graph = torch_ort.explain(call, x.requires_grad_(), places).graphs[0]
    assert graph.nodes["torch_ort.TakeGrad"] == 1
    assert graph.nodes["torch_ort.Take"] == 0
    assert not {"aten::index_put", "aten::index_add"} & graph.aten.keys()


def test_new_sizes_compile_nothing() -> None:
    call = torch.compile(lambda x, places: x[:, places], backend="ort", dynamic=True)

    def step(rows: int, size: int, count: int) -> None:
        x = torch.randn(rows, size, 8).cuda().requires_grad_()
        call(x, mixed(count, size).cuda()).sin().sum().backward()
        torch.cuda.synchronize()

    for sizes in ((3, 40, 5), (4, 9, 2100)):
        step(*sizes)
    before = _C.cuda.build_counts()
    for sizes in ((2, 40, 8), (5, 600, 700), (7, 33, 2500)):
        step(*sizes)
    assert _C.cuda.build_counts() == before


# ---- launches and machine code


@emulated
def test_launches(tmp_path, monkeypatch, request) -> None:
    names = ("taken rows", "taken columns", "taken often", "taken of many", "taken in strips")
    launches = launches_of(CASES, names, tmp_path, monkeypatch)
    accept = request.config.getoption("--accept")
    golden.compare("take_grad.launches", launches, accept)


@emulated
def test_columns_that_32_bits_cannot_count(tmp_path, monkeypatch) -> None:
    run_with_wide_columns(CASES["taken often"], tmp_path, monkeypatch)


# The name of a text, and how many instructions at least read and write 16 bytes.
WIDE = {
    "float_4_apart": (16, 2),
    "bf16_8_apart": (16, 2),
    "f16_8_apart": (16, 2),
    "double_2_apart": (16, 2),
    "float_1": (0, 0),
}


def test_good_machine_code(tmp_path) -> None:
    """No spill and no local memory, and accesses of 16 bytes."""
    texts = {}
    for name in ("taken runs", "taken bfloat16", "taken float16", "taken float64", "taken columns"):
        texts |= texts_of(CASES[name], tmp_path / name)
    texts = {name.removeprefix("sorted_sums_"): text for name, text in texts.items()}
    texts = {name: text for name, text in texts.items() if not name.startswith("sort_")}
    assert texts.keys() == WIDE.keys()
    for built in compile_texts(texts):
        assert faults(built, *WIDE[built.name]) == []
