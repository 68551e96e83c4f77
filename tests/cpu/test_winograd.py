"""Convolutions by Winograd's algorithm, and their gradients, against PyTorch in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import torch_ort
from tests.cpu.gradients import (
    assert_same_bits_for_any_threads,
    compare_at_sizes,
    compare_frozen,
    compare_gradients,
    compare_training,
    compare_two_calls,
    last,
    last_strides,
)
from tests.cpu.regions import ISAS, assert_near, crossed, read, run, type_text
from torch_ort import _C

LAST = torch.channels_last

# Batch, channels, [depth,] height, width; rows of the weight; padding.
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
    "volumes": ((2, 16, 5, 8, 6), 24, (1, 1, 1)),
    "more planes and tiles than a block has": ((2, 20, 19, 14, 13), 9, (1, 0, 1)),
    "volumes of few pixels": ((2, 3, 11, 2, 1), 5, (0, 1, 1)),
    "one plane": ((2, 9, 1, 7, 5), 3, (1, 1, 2)),
    "padding as wide as the window of volumes": ((1, 5, 2, 3, 4), 7, (2, 2, 2)),
    "more channels than blocks of volumes have": ((1, 270, 3, 6, 6), 150, (1, 1, 1)),
    "sums of volumes in parts": ((3, 7, 16, 17, 18), 11, (1, 1, 1)),
    "no volumes": ((0, 8, 3, 6, 6), 4, (1, 1, 1)),
}
PARTS = [
    "more tiles, channels and rows than blocks have", "sums in parts", "whole tiles",
    "more planes and tiles than a block has", "sums of volumes in parts",
]  # fmt: skip


def result_sizes(sizes: Sequence[int], padding: Sequence[int]) -> list[int]:
    return [size + 2 * pad - 2 for size, pad in zip(sizes, padding, strict=True)]


def ones(padding: Sequence[int]) -> tuple[int, ...]:
    return (1,) * len(padding)


def tensors(case: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return an image, a weight, and a gradient of the result; images are channels-last."""
    (batch, channels, *sizes), rows, padding = case
    x = torch.randn(batch, channels, *sizes, dtype=dtype)
    dy = torch.randn(batch, rows, *result_sizes(sizes, padding), dtype=dtype)
    w = torch.randn(rows, channels, *[3 for _ in sizes], dtype=dtype)
    return last(x), w, last(dy)


def exact_convolution(x: Tensor, w: Tensor, padding: Sequence[int]) -> Tensor:
    function = functional.conv2d if x.dim() == 4 else functional.conv3d
    return function(x.double(), w.double(), padding=tuple(padding))


def convolve(
    x: Tensor, w: Tensor, padding: tuple[int, ...], isa: str = "", turned: bool = False,
    bias: Tensor | None = None, **attrs,
) -> Tensor:  # fmt: skip
    rows = w.shape[1 if turned else 0]
    sizes = (x.shape[0], rows, *result_sizes(x.shape[2:], padding))
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
    dy: Tensor, x: Tensor, padding: tuple[int, ...], isa: str = "", by_rows: bool = False, **attrs
) -> Tensor:
    sizes = (dy.shape[1], x.shape[1], *[3 for _ in padding])
    steps = list(ones(padding))
    known = {"pads": list(padding), "strides": steps, "dilations": steps, "groups": 1} | attrs
    text = ", ".join(f"{key} = {value}" for key, value in known.items())
    graph = read(
        {"dy": type_text(dy.dtype, dy.shape), "x": type_text(x.dtype, x.shape)},
        [f"dw = torch_ort.WinogradWeightGrad <{text}> (dy, x)"],
        ["dw"],
        types={"dw": type_text(x.dtype, sizes)},
        strides={} if by_rows else {"dw": last_strides(sizes)},
    )
    (got,) = run(graph, {"dy": dy, "x": x}, isa)
    assert (got if by_rows else got.movedim(1, -1)).is_contiguous()
    return got


def exact_gradients(dy: Tensor, x: Tensor, w: Tensor, padding: tuple[int, ...]) -> list[Tensor]:
    one, zero = ones(padding), [0 for _ in padding]
    return torch.ops.aten.convolution_backward(
        dy.double(), x.double(), w.double(), None, one, list(padding), one, False, zero, 1,
        [True, True, False],
    )[:2]  # fmt: skip


def assert_close(got: Tensor, want: Tensor, terms: int) -> None:
    """Compare sums of so many products of normally distributed numbers."""
    assert got.shape == want.shape
    largest = float(want.abs().max()) if want.numel() else 0.0
    scale = max(1.0, largest, math.sqrt(terms))
    assert_near(got, want, atol=(4e-6 if got.dtype == torch.float32 else 1e-13) * scale)


def check(case: tuple, dtype: torch.dtype, isa: str, has_last_weight: bool = False) -> None:
    (_, channels, *_), rows, padding = case
    x, w, dy = tensors(case, dtype)
    w = last(w) if has_last_weight else w
    bias = torch.randn(len(w), dtype=dtype)
    want, num_taps = exact_convolution(x, w, padding), w[0, 0].numel()
    assert_close(convolve(x, w, padding, isa), want, num_taps * channels)
    want = want + bias.double().view(-1, *ones(padding))
    assert_close(convolve(x, w, padding, isa, bias=bias), want, num_taps * channels)
    dx, dw = exact_gradients(dy, x, w, padding)
    turned = convolve(dy, w, tuple(2 - pad for pad in padding), isa, turned=True)
    assert_close(turned, dx, num_taps * rows)
    found = weight_gradient(dy, x, padding, isa)
    assert_close(found, dw, dy[:, 0].numel())
    assert torch.equal(weight_gradient(dy, x, padding, isa, by_rows=True), found)


@crossed(isa=ISAS, dtype=(torch.float32, torch.float64), name=CASES)
def test_against_eager(name: str, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    if name.startswith("no "):
        x, w, dy = tensors(CASES[name], dtype)
        padding = CASES[name][2]
        assert torch.equal(convolve(x, w, padding, isa), torch.zeros_like(dy))
        assert torch.equal(weight_gradient(dy, x, padding, isa), torch.zeros_like(w))
        return
    check(CASES[name], dtype, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_weights_that_are_channels_last(isa: str) -> None:
    torch.manual_seed(0)
    for name in ("whole tiles", "more rows than one block of columns has", "volumes"):
        check(CASES[name], torch.float32, isa, has_last_weight=True)


@settings(max_examples=160, deadline=None)
@given(
    batch=st.integers(1, 3), channels=st.integers(1, 40), rows=st.integers(1, 40),
    image=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=2, max_size=3),
    isa=st.sampled_from(ISAS),
)  # fmt: skip
def test_any_sizes(batch, channels, rows, image, isa) -> None:
    torch.manual_seed(0)
    padding = tuple(pad for _, pad in image)
    sizes = (max(size, 3 - 2 * pad) for size, pad in image)
    check(((batch, channels, *sizes), rows, padding), torch.float32, isa)


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
@pytest.mark.parametrize("name", ["tiles that hang over edges", "volumes"])
@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_reaches_its_windows_alone(
    number: float, turned: bool, isa: str, name: str
) -> None:
    """Results are those of the definition: pixels beside a window do not change it."""
    torch.manual_seed(0)
    x, w, _ = tensors(CASES[name])
    x[1, 3, ..., 2, 2] = 1
    x.movedim(1, -1).flatten(0, -2)[-(x[0, 0].numel() // 2), 3] = number
    padding = CASES[name][2]
    weight = w
    if turned:
        padding = tuple(2 - pad for pad in padding)
        weight = w.flip([*range(2, w.dim())]).transpose(0, 1)
    want = exact_convolution(x, w, padding)
    want = want.float().double()  # what float32 cannot hold is infinite
    got = convolve(x, weight, padding, isa, turned=turned)
    assert not want.isfinite().all() or number == 3e38
    finite = [each.where(each.isfinite(), 0) for each in (got, want)]
    assert_close(*finite, w[0].numel())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize(
    "name", ["whole tiles", "sums in parts", "volumes", "sums of volumes in parts"]
)
def test_gradients_of_weights_that_are_not_finite(name: str) -> None:
    torch.manual_seed(0)
    x, w, dy = tensors(CASES[name])
    padding = CASES[name][2]
    x[0, 2].view(-1)[0] = float("inf")  # under no tap of the last plane, row or column
    _, want = exact_gradients(dy, x, w, padding)
    for by_rows in (False, True):
        got = weight_gradient(dy, x, padding, by_rows=by_rows)
        assert torch.equal(got.isfinite(), want.isfinite())
        assert got.isfinite()[:, 2].any()
        assert_near(got, want, rtol=1e-4, atol=1e-5 * math.sqrt(dy[:, 0].numel()))


@pytest.mark.parametrize("name", PARTS)
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    x, w, dy = tensors(CASES[name])
    padding = CASES[name][2]
    back = tuple(2 - pad for pad in padding)
    assert_same_bits_for_any_threads(
        lambda: (
            convolve(x, w, padding),
            convolve(dy, w, back, turned=True),
            weight_gradient(dy, x, padding),
        )
    )


def test_nodes_that_do_not_fit_their_operands() -> None:
    x, w, dy = tensors(CASES["whole tiles"])
    with pytest.raises(_C.InternalError, match="WinogradConvolution: the operands do not fit tog"):
        convolve(x, w[:, :5], (1, 1))
    with pytest.raises(_C.InternalError, match="WinogradConvolution: the operands do not fit tog"):
        convolve(x.contiguous(), w, (1, 1))
    with pytest.raises(_C.InternalError, match="pads: want 2 numbers from 0 to 2"):
        convolve(x, w, (3, 1))
    with pytest.raises(_C.InternalError, match="pads: want 2 numbers from 0 to 2"):
        convolve(x, w, (1, 1), pads=[1])
    with pytest.raises(_C.InternalError, match="got a bias of another size than that of 24 chann"):
        convolve(x, w, (1, 1), bias=torch.zeros(23))
    with pytest.raises(_C.InternalError, match="WinogradWeightGrad: the operands do not fit toge"):
        weight_gradient(last(dy[:, :, ::2, ::2]), x, (1, 1))
    for change in ({"strides": [2, 1]}, {"dilations": [1, 2]}, {"groups": 2}):
        with pytest.raises(_C.InternalError, match="want neither strides, dilation nor groups"):
            weight_gradient(dy, x, (1, 1), **change)
    volume, weight, _ = tensors(CASES["volumes"])
    with pytest.raises(_C.InternalError, match="pads: want 3 numbers from 0 to 2"):
        convolve(volume, weight, (1, 1, 1), pads=[1, 1])
    flat = read(
        {"x": "float[4,6]", "w": "float[4,4,3,3]"},
        ["y = torch_ort.WinogradConvolution <pads = [1, 1]> (x, w)"], ["y"],
        types={"y": "float[4,6]"}, strides={"y": "[6, 1]"},
    )  # fmt: skip
    with pytest.raises(
        _C.InternalError, match="WinogradConvolution: want images and a weight of 4"
    ):
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
    # Three layers are wide enough, each forward and back.
    assert count(model, x) == (6, 3)
    compare_training(model, x, 4e-6)


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
    compare_frozen(model, x, [model[2], model[5]], 4e-6)


def test_two_calls_alive_at_once() -> None:
    torch.manual_seed(0)
    compare_two_calls(network(), (4, 3, 16, 15))


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


def test_joined_with_a_row_major_image() -> None:
    """A row-major place in the concatenation is none for a result with channels last."""
    torch.manual_seed(0)
    each = nn.Conv2d(32, 32, 3, padding=1)
    exact = copy.deepcopy(each).double()
    x, other = last(torch.randn(3, 32, 9, 8)), torch.randn(3, 4, 9, 8)

    def joined(run: nn.Module, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat([run(x), other], 1)

    got = torch.compile(joined, backend="ort")(each, x, other)
    assert_near(got.detach(), joined(exact, x.double(), other.double()).detach(), atol=1e-5)
    assert torch_ort.counters()["fallbacks"] == 0


def test_short_floats_are_left_to_onednn() -> None:
    model = network().bfloat16()
    assert count(model, torch.randn(4, 3, 16, 15, dtype=torch.bfloat16)) == (0, 0)
