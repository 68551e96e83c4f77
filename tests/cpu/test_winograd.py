"""Convolutions by Winograd's algorithm, and their gradients, against PyTorch in float64."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import torch_ort
from tests.cpu.gradients import compare_at_sizes, compare_gradients
from tests.cpu.regions import ISAS, assert_near, crossed, read, run, type_text
from torch_ort import _C

LAST = torch.channels_last

# Batch, channels, height, width; rows of the weight; padding.
CASES = {
    "whole tiles": ((2, 16, 8, 6), 24, (1, 1)),
    "tiles that hang over edges": ((3, 20, 7, 5), 9, (0, 1)),
    "one pixel": ((1, 1, 1, 1), 1, (1, 1)),
    "a row of pixels": ((2, 3, 1, 9), 5, (1, 0)),
    "more tiles, channels and rows than blocks have": ((2, 300, 14, 13), 140, (1, 1)),
    "more rows than one block of columns has": ((1, 33, 6, 6), 290, (1, 1)),
    "sums in parts": ((3, 17, 40, 39), 19, (1, 1)),
    "padding as wide as the window": ((2, 5, 4, 4), 7, (2, 2)),
    "no images": ((0, 8, 6, 6), 4, (1, 1)),
    "no rows": ((2, 8, 6, 6), 0, (1, 1)),
    "no channels": ((2, 0, 6, 6), 3, (1, 1)),
}
PARTS = ["more tiles, channels and rows than blocks have", "sums in parts", "whole tiles"]


def last_strides(sizes: tuple[int, ...]) -> str:
    _, channels, height, width = sizes
    return f"[{channels * height * width}, 1, {channels * width}, {channels}]"


def tensors(case: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return an image, a weight, and a gradient of the result; images are channels-last."""
    (batch, channels, height, width), rows, (down, right) = case
    x = torch.randn(batch, channels, height, width, dtype=dtype)
    dy = torch.randn(batch, rows, height + 2 * down - 2, width + 2 * right - 2, dtype=dtype)
    w = torch.randn(rows, channels, 3, 3, dtype=dtype)
    return x.contiguous(memory_format=LAST), w, dy.contiguous(memory_format=LAST)


def convolve(
    x: Tensor, w: Tensor, padding: tuple[int, int], isa: str = "", turned: bool = False,
    bias: Tensor | None = None, **attrs,
) -> Tensor:  # fmt: skip
    rows = w.shape[1 if turned else 0]
    height, width = (size + 2 * pad - 2 for size, pad in zip(x.shape[2:], padding, strict=True))
    sizes = (x.shape[0], rows, height, width)
    known = {"pads": list(padding), "turned": int(turned)} | attrs
    text = ", ".join(f"{key} = {value}" for key, value in known.items())
    given = {"x": x, "w": w} | ({} if bias is None else {"b": bias})
    graph = read(
        {name: type_text(each.dtype, each.shape) for name, each in given.items()},
        [f"y = torch_ort.WinogradConvolution <{text}> ({', '.join(given)})"],
        ["y"],
        types={"y": type_text(x.dtype, sizes)},
        strides={"y": last_strides(sizes)},
    )
    (got,) = run(graph, given, isa)
    return got


def weight_gradient(
    dy: Tensor, x: Tensor, padding: tuple[int, int], isa: str = "", by_rows: bool = False, **attrs
) -> Tensor:
    sizes = (dy.shape[1], x.shape[1], 3, 3)
    known = {"pads": list(padding), "strides": [1, 1], "dilations": [1, 1], "groups": 1} | attrs
    text = ", ".join(f"{key} = {value}" for key, value in known.items())
    graph = read(
        {"dy": type_text(dy.dtype, dy.shape), "x": type_text(x.dtype, x.shape)},
        [f"dw = torch_ort.WinogradWeightGrad <{text}> (dy, x)"],
        ["dw"],
        types={"dw": type_text(x.dtype, sizes)},
        strides={} if by_rows else {"dw": last_strides(sizes)},
    )
    (got,) = run(graph, {"dy": dy, "x": x}, isa)
    assert got.is_contiguous(memory_format=torch.contiguous_format if by_rows else LAST)
    return got


def exact_gradients(dy: Tensor, x: Tensor, w: Tensor, padding: tuple[int, int]) -> list[Tensor]:
    return torch.ops.aten.convolution_backward(
        dy.double(), x.double(), w.double(), None, [1, 1], list(padding), [1, 1], False, [0, 0], 1,
        [True, True, False],
    )[:2]  # fmt: skip


def assert_close(got: Tensor, want: Tensor, terms: int) -> None:
    """Compare sums of so many products of normally distributed numbers."""
    assert got.shape == want.shape
    largest = float(want.abs().max()) if want.numel() else 0.0
    scale = max(1.0, largest, math.sqrt(terms))
    assert_near(got, want, atol=(4e-6 if got.dtype == torch.float32 else 1e-13) * scale)


def check(case: tuple, dtype: torch.dtype, isa: str, weight_format: torch.memory_format) -> None:
    padding = case[2]
    x, w, dy = tensors(case, dtype)
    w = w.contiguous(memory_format=weight_format)
    bias = torch.randn(len(w), dtype=dtype)
    want = functional.conv2d(x.double(), w.double(), bias.double(), padding=padding)
    (batch, channels, *_), rows, _ = case
    assert_close(convolve(x, w, padding, isa, bias=bias), want, 9 * channels)
    assert_close(convolve(x, w, padding, isa), want - bias.double()[:, None, None], 9 * channels)
    dx, dw = exact_gradients(dy, x, w, padding)
    turned = convolve(dy, w, (2 - padding[0], 2 - padding[1]), isa, turned=True)
    assert_close(turned, dx, 9 * rows)
    found = weight_gradient(dy, x, padding, isa)
    assert_close(found, dw, batch * dy.shape[2] * dy.shape[3])
    assert torch.equal(weight_gradient(dy, x, padding, isa, by_rows=True), found)


@crossed(isa=ISAS, dtype=(torch.float32, torch.float64), name=CASES)
def test_against_eager(name: str, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    if name.startswith("no "):
        x, w, dy = tensors(CASES[name], dtype)
        assert torch.equal(convolve(x, w, (1, 1), isa), torch.zeros_like(dy))
        assert torch.equal(weight_gradient(dy, x, (1, 1), isa), torch.zeros_like(w))
        return
    check(CASES[name], dtype, isa, torch.contiguous_format)


@pytest.mark.parametrize("isa", ISAS)
def test_weights_that_are_channels_last(isa: str) -> None:
    torch.manual_seed(0)
    for name in ("whole tiles", "more rows than one block of columns has"):
        check(CASES[name], torch.float32, isa, LAST)


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)),
    rows=st.integers(1, 40), padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    isa=st.sampled_from(ISAS),
)  # fmt: skip
def test_any_sizes(sizes, rows, padding, isa) -> None:
    torch.manual_seed(0)
    sizes = (
        *sizes[:2],
        *(max(size, 3 - 2 * pad) for size, pad in zip(sizes[2:], padding, strict=True)),
    )
    check((sizes, rows, padding), torch.float32, isa, torch.contiguous_format)


def test_large_offsets_round_no_worse_than_eager() -> None:
    torch.manual_seed(0)
    x, w, dy = tensors(((2, 64, 12, 12), 64, (1, 1)))
    x += 1000
    exact = functional.conv2d(x.double(), w.double(), padding=1)
    ours = (convolve(x, w, (1, 1)) - exact).norm()
    assert ours <= 3 * (functional.conv2d(x, w, padding=1) - exact).norm()
    _, exact = exact_gradients(dy, x, w, (1, 1))
    eager = torch.ops.aten.convolution_backward(
        dy, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]
    assert (weight_gradient(dy, x, (1, 1)) - exact).norm() <= 3 * (eager - exact).norm()


def test_parts_of_images() -> None:
    """Pixels of the image may be apart, and its channels among others."""
    x, w, dy = tensors(CASES["whole tiles"])
    wide = torch.randn(2, 11, 9, 40)
    wide[:, 2:10, 1:7, 9:25] = x.permute(0, 2, 3, 1)
    part = wide[:, 2:10, 1:7, 9:25].permute(0, 3, 1, 2)
    assert torch.equal(convolve(part, w, (1, 1)), convolve(x, w, (1, 1)))
    assert torch.equal(weight_gradient(dy, part, (1, 1)), weight_gradient(dy, x, (1, 1)))


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_reaches_its_windows_alone(
    number: float, turned: bool, isa: str
) -> None:
    """Results are those of the definition: pixels beside a window do not change it."""
    torch.manual_seed(0)
    x, w, _ = tensors(CASES["tiles that hang over edges"])
    x[1, 3, 2, 2] = number
    padding, weight = ((0, 1), w) if not turned else ((2, 1), w.flip(2, 3).transpose(0, 1))
    want = functional.conv2d(x.double(), w.double(), padding=padding)
    want = want.float().double()  # what float32 cannot hold is infinite
    got = convolve(x, weight, padding, isa, turned=turned)
    assert not want.isfinite().all() or number == 3e38
    finite = [each.where(each.isfinite(), 0) for each in (got, want)]
    assert_close(*finite, 9 * x.shape[1])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("name", ["whole tiles", "sums in parts"])
def test_gradients_of_weights_that_are_not_finite(name: str) -> None:
    torch.manual_seed(0)
    x, w, dy = tensors(CASES[name])
    x[0, 2, 0, 0] = float("inf")  # under no tap of the last row or column
    _, want = exact_gradients(dy, x, w, (1, 1))
    for by_rows in (False, True):
        got = weight_gradient(dy, x, (1, 1), by_rows=by_rows)
        assert torch.equal(got.isfinite(), want.isfinite())
        assert got.isfinite()[:, 2].any()
        assert_near(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PARTS)
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    x, w, dy = tensors(CASES[name])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(
                (convolve(x, w, (1, 1)), convolve(dy, w, (1, 1), turned=True),
                 weight_gradient(dy, x, (1, 1)))
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.pairwise(results):
        assert all(map(torch.equal, one, other))


def test_nodes_that_do_not_fit_their_operands() -> None:
    x, w, dy = tensors(CASES["whole tiles"])
    with pytest.raises(_C.InternalError, match="WinogradConvolution: the operands do not fit tog"):
        convolve(x, w[:, :5], (1, 1))
    with pytest.raises(_C.InternalError, match="WinogradConvolution: the operands do not fit tog"):
        convolve(x.contiguous(), w, (1, 1))
    with pytest.raises(_C.InternalError, match="pads: want two numbers from 0 to 2"):
        convolve(x, w, (3, 1))
    with pytest.raises(_C.InternalError, match="pads: want two numbers from 0 to 2"):
        convolve(x, w, (1, 1), pads=[1])
    with pytest.raises(_C.InternalError, match="got a bias of another size than that of 24 chann"):
        convolve(x, w, (1, 1), bias=torch.zeros(23))
    with pytest.raises(_C.InternalError, match="WinogradWeightGrad: the operands do not fit toge"):
        weight_gradient(dy, x, (1, 1), strides=[2, 2])
    with pytest.raises(_C.InternalError, match="want windows of 3x3, and neither strides, dilati"):
        weight_gradient(dy[:, :, ::2, ::2].contiguous(memory_format=LAST), x, (1, 1),
                        strides=[2, 2])  # fmt: skip
    flat = read(
        {"x": "float[4,6]", "w": "float[4,4,3,3]"},
        ["y = torch_ort.WinogradConvolution <pads = [1, 1]> (x, w)"], ["y"],
        types={"y": "float[4,6]"}, strides={"y": "[6, 1]"},
    )  # fmt: skip
    with pytest.raises(_C.InternalError, match="WinogradConvolution: want images of 4 dims"):
        run(flat, {"x": torch.zeros(4, 6), "w": torch.zeros(4, 4, 3, 3)})
    half = x.half()
    with pytest.raises(_C.InternalError, match="WinogradConvolution: got float16, want float32 or"):
        convolve(half, w.half(), (1, 1))


# ---- as the pass writes it -----------------------------------------------------------------------


def network(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=bias), nn.ReLU(),
        nn.Conv2d(32, 40, 3, padding=1, bias=bias), nn.BatchNorm2d(40), nn.ReLU(),
        nn.Conv2d(40, 64, 3, bias=bias), nn.GELU(),
        nn.Conv2d(64, 32, 3, padding=(1, 0), bias=bias), nn.ReLU(),
        nn.Conv2d(32, 4, 3, stride=2, bias=bias),
    )  # fmt: skip


def count(model: nn.Module, x: Tensor) -> tuple[int, int]:
    nodes = torch_ort.explain(copy.deepcopy(model), x).graphs[0].nodes
    return nodes["torch_ort.WinogradConvolution"], nodes["torch_ort.WinogradWeightGrad"]


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("registers", ["few_registers", "many_registers"])
def test_training(bias: bool, registers: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(registers)
    torch.manual_seed(0)
    model, x = network(bias), torch.randn(4, 3, 16, 15)
    exact = copy.deepcopy(model).double()
    # Three layers are wide enough, each forward and back.
    assert count(model, x) == (6, 3)
    compiled = torch.compile(model, backend="ort")
    mine, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, exact))
    for step in range(3):
        y, want = compiled(x), exact(x.double())
        assert_near(y.detach(), want.detach(), atol=1e-5 * (step + 1))
        y.square().mean().backward()
        want.square().mean().backward()
        compare_gradients(model, exact, 4e-6 * (step + 1))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()


def test_an_ortmodule_trains_the_same() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(4, 3, 16, 15)
    exact = copy.deepcopy(model).double()
    torch_ort.ORTModule(model)(x).square().mean().backward()
    exact(x.double()).square().mean().backward()
    compare_gradients(model, exact, 4e-6)


def test_other_sizes_of_images_and_batches() -> None:
    torch.manual_seed(0)
    compare_at_sizes(network(), [(4, 3, 14, 13), (3, 3, 9, 20), (5, 3, 7, 7)], 4e-6)


def test_frozen_weights_and_images_that_need_gradients() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(4, 3, 16, 15)
    for layer in (model[2], model[5]):
        layer.weight.requires_grad_(False)
    exact = copy.deepcopy(model).double()
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    torch.compile(model, backend="ort")(mine).square().mean().backward()
    exact(theirs).square().mean().backward()
    compare_gradients(model, exact, 4e-6)
    assert_near(mine.grad, theirs.grad, atol=4e-6)


def test_two_calls_alive_at_once() -> None:
    torch.manual_seed(0)
    model = network()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort")
    batches = [torch.randn(4, 3, 16, 15) for _ in range(2)]
    for call, to in ((compiled, torch.float32), (exact, torch.float64)):
        results = [call(x.to(to)).square().mean() for x in batches]
        for result in reversed(results):
            result.backward()
    compare_gradients(model, exact, 8e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: type) -> None:
    torch.manual_seed(0)
    model, x = network().eval(), torch.randn(4, 3, 16, 15)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort")
    with mode():
        assert count(model, x) == (3, 0)
        for _ in range(2):
            assert_near(compiled(x), exact(x.double()), atol=1e-5)


def test_short_floats_are_left_to_onednn() -> None:
    model = network().bfloat16()
    assert count(model, torch.randn(4, 3, 16, 15, dtype=torch.bfloat16)) == (0, 0)
