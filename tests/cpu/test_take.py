"""Places along one dim, taken out and put back by the engine's kernels, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_ort
from tests.cpu.regions import ISAS, REAL, assert_near, crossed, read, run, type_text
from torch_ort import _C

Call = Callable[[Tensor, Tensor], Tensor]
SHAPES = {
    "one dim": ((7,), 0), "rows": ((9, 5), 0), "columns": ((5, 9), 1), "runs": ((3, 7, 4), 1),
    "within": ((2, 3, 4, 5), 2), "no others": ((0, 6), 1), "none taken from": ((4, 0, 3), 0),
    "one": ((3, 1, 2), 1),
}  # fmt: skip
PLACES = {"some": (6,), "two dims": (2, 3), "none": (0,), "no dims": (), "repeated": (40,)}


def random_places(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(-size, size, shape).to(dtype)


def index(axis: int) -> Call:
    return lambda x, places: x[(slice(None),) * axis + (places,)]


def summed(parts: Tensor, places: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    """Add parts up in zeros, in float64."""
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    taken = index(axis)(x, places.long())
    return torch.autograd.grad(taken, x, parts.double())[0]


def kernel(
    op: str,
    operand: Tensor,
    places: Tensor,
    result: tuple[int, ...],
    axis: int,
    strides: str = "",
    isa: str = "",
) -> Tensor:
    text = type_text(operand.dtype, result)
    node = f"y = torch_ort.{op} <axis = {axis}, from_end = 1> (x, places)"
    inputs = {
        "x": type_text(operand.dtype, operand.shape),
        "places": type_text(places.dtype, places.shape),
    }
    known = {"y": strides} if strides else None
    graph = read(inputs, [node], ["y"], types={"y": text}, strides=known)
    return run(graph, {"x": operand, "places": places}, isa)[0]


def put_back(
    parts: Tensor, places: Tensor, shape: tuple[int, ...], axis: int, isa: str = ""
) -> Tensor:
    return kernel("TakeGrad", parts, places, shape, axis, isa=isa)


INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)


@crossed(dtype=(*INTEGERS, *reversed(REAL)), of_places=PLACES, of_x=SHAPES)
def test_take(of_x: str, of_places: str, dtype: torch.dtype) -> None:
    shape, axis = SHAPES[of_x]
    x = (torch.randn(shape) * 3).to(dtype)
    places = random_places(shape[axis], PLACES[of_places])
    want = index(axis)(x, places)
    got = kernel("Take", x, places, tuple(want.shape), axis)
    assert got.dtype == dtype
    assert torch.equal(got, want)


@crossed(isa=ISAS, dtype=REAL, of_places=PLACES, of_x=SHAPES)
def test_put_back(of_x: str, of_places: str, dtype: torch.dtype, isa: str) -> None:
    shape, axis = SHAPES[of_x]
    places = random_places(shape[axis], PLACES[of_places])
    parts = torch.randn(index(axis)(torch.empty(shape), places).shape).to(dtype)
    got = put_back(parts, places, shape, axis, isa)
    assert got.dtype == dtype
    assert_near(got, summed(parts, places, shape, axis), atol=2e-6 if dtype.itemsize == 4 else None)


def test_short_integers_as_places() -> None:
    x, places = torch.randn(5, 9), random_places(9, (2, 3), torch.int32)
    want = x[:, places]
    assert torch.equal(kernel("Take", x, places, (5, 2, 3), 1), want)
    assert_near(put_back(want, places, (5, 9), 1), summed(want, places, (5, 9), 1), atol=2e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize(
    ("shape", "axis", "count"),
    [
        ((300, 700), 1, 600),  # more places than stand in a block
        ((2, 90_000), 1, 3000),  # fewer than the sums of short floats that fit
        ((3000, 40), 0, 2000),  # columns for each thread
        ((50_000, 3), 0, 1500),  # a part of the dim for each thread
        ((200_000,), 0, 700),
        ((2, 30, 40, 50), 1, 45),
        ((5, 7, 40_000), 1, 9),  # runs that are longer than the work of a thread
    ],
    ids=str,
)
def test_large(
    shape: tuple[int, ...], axis: int, count: int, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    x, places = torch.randn(shape).to(dtype), random_places(shape[axis], (count,))
    want = index(axis)(x, places)
    assert torch.equal(kernel("Take", x, places, tuple(want.shape), axis), want)
    parts = torch.randn(want.shape).to(dtype)
    atol = 1e-5 if dtype == torch.float32 else None
    assert_near(put_back(parts, places, shape, axis), summed(parts, places, shape, axis), atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((60, 70), 1), ((4000, 64), 0), ((90_000, 2), 0)])
def test_same_bits_for_any_number_of_threads(shape: tuple[int, int], axis: int, dtype) -> None:
    places = random_places(50, (4000,))
    parts, results = torch.randn(index(axis)(torch.empty(shape), places).shape).to(dtype), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(put_back(parts, places, shape, axis))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_short_floats_are_added_in_float32() -> None:
    # Halves that bfloat16 would lose next to the 256 one by one.
    parts = torch.cat([torch.full((1, 1), 256.0), torch.full((1, 64), 0.5)], 1).bfloat16()
    places = torch.zeros(65, dtype=torch.int64)
    assert put_back(parts, places, (1, 2), 1).tolist() == [[288, 0]]


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
    "within first": lambda x: x.permute(1, 0, 2).contiguous().permute(1, 0, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_any_layout(layout: str, axis: int, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(4, 5, 6).to(dtype))
    places = random_places(x.shape[axis], (6, 4)).t()
    compiled = torch.compile(lambda x, places: index(axis)(x, places) * 1, backend="ort")
    leaf = x.detach().requires_grad_()
    taken = compiled(leaf, places)
    assert torch.equal(taken, index(axis)(x, places))
    shape = taken.shape
    parts = torch.randn([*shape[:-2], shape[-1], shape[-2]]).to(dtype).transpose(-1, -2)
    (grad,) = torch.autograd.grad(taken, leaf, parts)
    assert_near(grad, summed(parts, places, (4, 5, 6), axis), atol=1e-5)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize(
    ("shape", "count"),
    [((50,), 9), ((40, 5), 9), ((90, 700), 60)],  # columns are shared by two threads at last
    ids=str,
)
def test_parts_with_gaps(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    places = random_places(shape[0], (count,))
    parts = torch.randn(count, *shape[1:], 2).to(dtype)[..., 0]
    got = put_back(parts, places, shape, 0)
    atol = 1e-5 if dtype == torch.float32 else None
    assert_near(got, summed(parts, places, shape, 0), atol=atol)


@pytest.mark.parametrize(("shape", "axis", "order"), [((4, 5), 1, "[1,4]"), ((5, 4), 0, "[1,3]")])
def test_results_of_any_layout(shape: tuple[int, int], axis: int, order: str) -> None:
    x, places = torch.randn(shape), torch.tensor([4, 0, -1])
    want = index(axis)(x, places)
    got = kernel("Take", x, places, tuple(want.shape), axis, order)
    assert got.stride() == tuple(int(stride) for stride in order[1:-1].split(","))
    assert torch.equal(got, want)
    back = kernel("TakeGrad", want, places, shape, axis, f"[1,{shape[0]}]")
    assert back.stride() == (1, shape[0])
    assert_near(back, summed(want, places, shape, axis))


def taken_nodes(call: Call, *inputs: Tensor, **options: object) -> dict[str, int]:
    """Count the nodes that take places, the engine's and PyTorch's."""
    graph = torch_ort.explain(call, *inputs, options=options).graphs[0]
    ours = {op: graph.nodes[f"torch_ort.{op}"] for op in ("Take", "TakeGrad")}
    return ours | {op: graph.aten[op] for op in ("aten::index", "aten::index_put")}


CALLS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "columns": (lambda x, places: x[:, places], (4, 8)),
    "rows": (lambda x, places: x[places], (8, 4)),
    "within": (lambda x, places: x[:, places], (3, 8, 5)),
    "last": (lambda x, places: x[..., places], (3, 4, 8)),
    "transposed": (lambda x, places: x.t()[places], (4, 8)),
    "select": (lambda x, places: x.index_select(2, places.abs()), (2, 3, 8, 4)),
    "two dims": (lambda x, places: x[:, places.view(2, -1)], (4, 8)),
    "twice": (lambda x, places: x[:, places][:, places] * x[:, places.flip(0)], (4, 8)),
}


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_against_eager_in_float64(name: str, dtype: torch.dtype) -> None:
    call, shape = CALLS[name]

    def step(x: Tensor, places: Tensor) -> Tensor:
        return (call(x.sin(), places) * 2).cos()

    places = random_places(8, (8,)) % 8 - (8 if name not in ("select", "twice") else 0)
    x = torch.randn(shape).to(dtype).requires_grad_()
    compiled = torch.compile(step, backend="ort")
    wide = x.detach().double().requires_grad_()
    want, got = step(wide, places), compiled(x, places)
    assert_near(got, want.detach(), rtol=4e-2 if dtype.itemsize == 2 else 1e-5)
    grads = [torch.autograd.grad(y.double().sum(), leaf)[0] for y, leaf in ((want, wide), (got, x))]
    assert_near(grads[1], grads[0], rtol=6e-2 if dtype.itemsize == 2 else 2e-5)
    counts = taken_nodes(step, x, places)
    assert counts["Take"] >= 1
    assert counts["TakeGrad"] >= 1
    assert (counts["aten::index"], counts["aten::index_put"]) == (0, 0)


def test_dynamic_sizes() -> None:
    def step(x: Tensor, places: Tensor) -> Tensor:
        return x[:, places] * 2

    compiled = torch.compile(step, backend="ort", dynamic=True)
    for rows, columns, count in ((3, 5, 4), (6, 9, 2), (4, 2, 30), (5, 7, 3)):
        x, places = torch.randn(rows, columns).requires_grad_(), random_places(columns, (count,))
        got = compiled(x, places)
        assert torch.equal(got, step(x, places))
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), x), torch.autograd.grad(step(x, places).sum(), x)
        )
    counts = taken_nodes(step, x, places)
    assert (counts["Take"], counts["TakeGrad"]) == (1, 1)


def test_parts_of_a_concatenation() -> None:
    def step(x: Tensor, places: Tensor) -> Tensor:
        return torch.cat([x[:, places], x.sin()], 1)

    x, places = torch.randn(4, 8, requires_grad=True), random_places(8, (5,))
    got = torch.compile(step, backend="ort")(x, places)
    assert torch.equal(got[:, :5], x[:, places])
    weight = torch.randn(4, 13)
    wants = torch.autograd.grad((step(x, places) * weight).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((got * weight).sum(), x), wants)


def columns(x: Tensor, places: Tensor) -> Tensor:
    return x[:, places]


def rows(x: Tensor, places: Tensor) -> Tensor:
    return x[places]


def select(x: Tensor, places: Tensor) -> Tensor:
    return x.index_select(2, places)


def select_short(x: Tensor, places: Tensor) -> Tensor:
    return x.bfloat16().index_select(1, places)


NO_INDEX = "index {} is out of bounds for dimension 0 with size 5"
NO_ROW = "index out of range in self"
NO_DATA = "INDICES element is out of DATA bounds, id={} axis_dim=5"
ERRORS = [
    (columns, (4, 5), 7, IndexError, NO_INDEX),
    (columns, (4, 5), -6, IndexError, NO_INDEX),
    (rows, (5, 4), 5, IndexError, NO_INDEX),
    (select, (2, 3, 5), 7, IndexError, NO_ROW),
    (select, (2, 3, 5), -1, IndexError, NO_ROW),
    (select_short, (4, 5), 9, RuntimeError, NO_DATA),
]


@pytest.mark.parametrize(("call", "shape", "place", "error", "words"), ERRORS)
def test_errors_are_those_of_eager(
    call: Call, shape: tuple[int, ...], place: int, error: type[Exception], words: str
) -> None:
    x, compiled = torch.randn(shape), torch.compile(call, backend="ort")
    good = torch.tensor([1, 0, 4])
    assert torch.equal(compiled(x, good), call(x, good))
    assert taken_nodes(call, x, good)["Take"] == 1
    for run_it in (call, compiled):
        with pytest.raises(error, match=words.format(place)) as raised:
            run_it(x, torch.tensor([1, place, 77]))
        assert raised.type is error
    assert torch.equal(compiled(x, good), call(x, good))


def outcome(call: Call, x: Tensor, places: Tensor) -> tuple[type, str]:
    """Give the type and the shape of the result, or the type and the words of the error."""
    try:
        return Tensor, str(call(x, places).shape)
    except (IndexError, RuntimeError) as error:
        return type(error), str(error).splitlines()[0].split(" (in ")[0]


@pytest.mark.parametrize("call", [lambda x, p: x[:, :, p], lambda x, p: x.index_select(2, p)])
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 3, 0), (0, 3, 0), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("places", [[0], [7], [-9], []], ids=str)
def test_no_elements(call: Call, shape: tuple[int, ...], places: list[int]) -> None:
    compiled = torch.compile(call, backend="ort", dynamic=True)
    compiled(torch.randn(3, 4, 6), torch.tensor([0, 1]))
    x, ids = torch.randn(shape), torch.tensor(places, dtype=torch.int64)
    assert outcome(compiled, x, ids) == outcome(call, x, ids)


def test_rounding_as_eager_keeps_pytorchs_kernels() -> None:
    x, places = torch.randn(4, 8, requires_grad=True), random_places(8, (5,))
    counts = taken_nodes(lambda x, places: x[:, places] * 2, x, places, emulate_eager_casts=True)
    assert counts == {"Take": 0, "TakeGrad": 0, "aten::index": 1, "aten::index_put": 1}


def test_a_program_says_what_it_takes() -> None:
    inputs = {"x": "float[4,9,2]", "places": "int64[3]"}
    node = "y = torch_ort.Take <axis = 1> (x, places)"
    graph = read(inputs, [node], ["y"], types={"y": "float[4,3,2]"})
    session = _C.Session.compile(graph, {})
    session.run({"x": torch.randn(4, 9, 2), "places": torch.tensor([8, 0, 1])})
    ((_, text),) = session.programs()
    assert text == "take 3 places of 9, 4 times 2\n"


def test_an_op_without_a_kernel_on_the_device_is_refused() -> None:
    node = "y = torch_ort.Casts <to = 16> (x)"
    graph = read({"x": "float[4,9]"}, [node], ["y"], types={"y": "bfloat16[4,9]"})
    session = _C.Session.compile(graph, {})
    with pytest.raises(_C.Unsupported, match=r"torch_ort\.Casts '.*': no kernel for device 'cpu'"):
        session.run({"x": torch.randn(4, 9)})
