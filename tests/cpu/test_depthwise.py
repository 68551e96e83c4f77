"""Convolutions of each channel by itself and their gradients, against eager PyTorch in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_ort
from tests.cpu.gradients import (
    assert_same_bits_for_any_threads,
    compare_at_sizes,
    compare_gradients,
    last,
    last_strides,
    result_size,
)
from tests.cpu.regions import ISAS, assert_near, crossed, read, run, type_text
from torch_ort import _C

# Batch, channels, height, width; window, stride, padding, dilation.
CASES = {
    "7x7": ((4, 32, 16, 16), (7, 7), (1, 1), (3, 3), (1, 1)),
    "some channels of a block": ((3, 20, 9, 13), (5, 5), (1, 1), (2, 2), (1, 1)),
    "stride": ((2, 16, 8, 9), (7, 7), (2, 3), (3, 3), (1, 1)),
    "dilation": ((2, 5, 19, 17), (7, 7), (1, 1), (0, 0), (2, 2)),
    "all of both": ((3, 40, 11, 10), (5, 3), (2, 1), (4, 1), (2, 3)),
    "3x3": ((2, 33, 9, 21), (3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3, every other pixel": ((2, 48, 12, 22), (3, 3), (2, 2), (1, 1), (1, 1)),
    "5x5, every other pixel": ((2, 20, 13, 41), (5, 5), (2, 2), (2, 2), (1, 1)),
    "7x7, every other pixel": ((1, 16, 15, 43), (7, 7), (2, 2), (3, 3), (1, 1)),
    "one row": ((1, 20, 1, 300), (1, 5), (1, 1), (0, 2), (1, 1)),
    "one row, with many taps": ((2, 7, 1, 150), (1, 31), (1, 2), (0, 15), (1, 1)),
    "pads wider than windows": ((2, 16, 13, 70), (3, 3), (1, 1), (6, 9), (3, 5)),
    "one pixel": ((16, 128, 1, 1), (7, 7), (1, 1), (3, 3), (1, 1)),
    "more taps than a register holds": ((2, 3, 30, 31), (9, 11), (3, 2), (5, 6), (1, 1)),
    "one channel": ((2, 1, 6, 6), (4, 4), (1, 1), (1, 1), (1, 1)),
    "no images": ((0, 8, 6, 6), (5, 5), (1, 1), (2, 2), (1, 1)),
    "no results": ((2, 8, 3, 3), (4, 3), (1, 1), (0, 0), (1, 1)),
}
LAST = torch.channels_last
# The error that is allowed, in parts of the largest number: of sums, or of the rounded result.
SLACK = {
    torch.float32: 4e-6, torch.float64: 1e-13, torch.bfloat16: 0.51 * 2**-7,
    torch.float16: 0.51 * 2**-10,
}  # fmt: skip


def scale_of(want: Tensor) -> float:
    return max(float(want.abs().max()) if want.numel() else 1.0, 1.0)


def numbers(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a gradient of the result and an image, both channels-last."""
    (batch, channels, *image), *rest = CASES[name]
    result = [result_size(*each) for each in zip(image, *rest, strict=True)]
    shapes = (batch, channels, *result), (batch, channels, *image)
    dy, x = (torch.randn(shape, dtype=dtype).contiguous(memory_format=LAST) for shape in shapes)
    return dy, x


def strides_of(x: Tensor) -> str:
    return "[" + ",".join(map(str, x.stride())) + "]"


def kernel(
    name: str, dy: Tensor, x: Tensor, has_bias: bool, isa: str = "", **attrs
) -> list[Tensor]:
    window, stride, padding, dilation = map(list, CASES[name][1:])
    settings = {"strides": stride, "pads": padding, "dilations": dilation} | attrs
    text = ", ".join(f"{key} = {value}" for key, value in settings.items())
    outputs = ["dw", "db"] if has_bias else ["dw"]
    channels = x.shape[1]
    types = {
        "dw": type_text(dy.dtype, (channels, 1, *window)),
        "db": type_text(dy.dtype, (channels,)),
    }
    node = f"{', '.join(outputs)} = torch_ort.DepthwiseWeightGrad <{text}> (dy, x)"
    inputs = {"dy": type_text(dy.dtype, dy.shape), "x": type_text(x.dtype, x.shape)}
    known = {name: types[name] for name in outputs}
    return run(read(inputs, [node], outputs, types=known), {"dy": dy, "x": x}, isa)


def eager(
    name: str, dy: Tensor, x: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    window, stride, padding, dilation = map(list, CASES[name][1:])
    channels = x.shape[1]
    weight = torch.zeros(channels, 1, *window, dtype=dtype)
    _, dw, db = torch.ops.aten.convolution_backward(
        dy.to(dtype), x.to(dtype), weight, [channels], stride, padding, dilation, False, [0, 0],
        channels, [False, True, True],
    )  # fmt: skip
    return dw, db


@crossed(isa=ISAS, has_bias=(False, True), dtype=SLACK, name=CASES)
def test_against_eager(name: str, dtype: torch.dtype, has_bias: bool, isa: str) -> None:
    if name == "no results":
        pytest.skip("eager PyTorch refuses it")
    dy, x = numbers(name, dtype)
    got = kernel(name, dy, x, has_bias, isa)
    for found, want in zip(got, eager(name, dy, x), strict=False):
        assert found.dtype == dtype
        assert_near(found, want, atol=SLACK[dtype] * scale_of(want))


def test_parts_of_images() -> None:
    """Channels lie side by side, and pixels and images apart."""
    dy, x = numbers("7x7", torch.float32)
    wide_dy, wide_x = torch.randn(4, 16, 16, 40), torch.randn(4, 20, 20, 33)
    wide_dy[..., 5:37], wide_x[:, 2:18, 1:17, 1:] = dy.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
    parts = (
        wide_dy[..., 5:37].permute(0, 3, 1, 2), wide_x[:, 2:18, 1:17, 1:].permute(0, 3, 1, 2),
    )  # fmt: skip
    for got, want in zip(kernel("7x7", *parts, True), kernel("7x7", dy, x, True), strict=True):
        assert torch.equal(got, want)


def test_infinities_reach_their_taps_alone() -> None:
    dy, x = numbers("7x7", torch.float32)
    x[1, 3, 0, 0] = float("inf")
    (got,) = kernel("7x7", dy, x, False)
    reached = ~got.isfinite()
    assert reached[3, 0, :4, :4].all()  # the first pixel is under these taps of some place
    assert reached.sum() == 16


@pytest.mark.parametrize("name", ["7x7", "some channels of a block", "stride"])
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    dy, x = numbers(name, torch.float32)
    assert_same_bits_for_any_threads(lambda: kernel(name, dy, x, True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strides": [2, 2]}, "the operands do not fit together"),
        ({"pads": [3]}, "pads: got 1 numbers, want 2"),
        ({"dilations": [2, 2]}, "the operands do not fit together"),
        ({"strides": [0, 1]}, "strides: got 0, want 1 to 1048576"),
        ({"dilations": [1, -1]}, "dilations: got -1, want 1 to 1048576"),
        ({"pads": [-1, 3]}, "pads: got -1, want 0 to 1048576"),
        ({"dilations": [2**62, 1]}, f"dilations: got {2**62}, want 1 to 1048576"),
        ({"pads": [8, 3]}, "pads: got 8, want at most the 7 pixels that a window reaches over"),
    ],
    ids=str,
)
def test_nodes_that_do_not_fit_their_operands(change: dict, words: str) -> None:
    dy, x = numbers("7x7", torch.float32)
    with pytest.raises(_C.InternalError, match=words):
        kernel("7x7", dy, x, False, **change)


def test_row_major_images_are_refused() -> None:
    dy, x = numbers("7x7", torch.float32)
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        kernel("7x7", dy.contiguous(), x, False)


# ---- convolutions, and gradients towards the image -----------------------------------------------


def convolved(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, isa: str = "", **attrs
) -> Tensor:
    """Run the kernel; `y` says the sizes and strides of its result."""
    _, stride, padding, dilation = map(list, CASES[name][1:])
    settings = {"strides": stride, "pads": padding, "dilations": dilation} | attrs
    text = ", ".join(f"{key} = {value}" for key, value in settings.items())
    given = {"x": x, "w": weight} | ({} if bias is None else {"b": bias})
    node = f"y = torch_ort.DepthwiseConvolution <{text}> ({', '.join(given)})"
    inputs = {each: type_text(value.dtype, value.shape) for each, value in given.items()}
    types, strides = {"y": type_text(y.dtype, y.shape)}, {"y": last_strides(y.shape)}
    return run(read(inputs, [node], ["y"], types=types, strides=strides), given, isa)[0]


def weight_of(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    channels = CASES[name][0][1]
    return torch.randn(channels, 1, *CASES[name][1], dtype=dtype), torch.randn(
        channels, dtype=dtype
    )


@crossed(isa=ISAS, has_bias=(False, True), dtype=SLACK, name=CASES)
def test_convolutions_against_eager(
    name: str, dtype: torch.dtype, has_bias: bool, isa: str
) -> None:
    if name == "no results":
        pytest.skip("eager PyTorch refuses it")
    dy, x = numbers(name, dtype)
    weight, bias = weight_of(name, dtype)
    _, stride, padding, dilation = CASES[name][1:]
    given = bias if has_bias else None
    got = convolved(name, x, weight, given, dy, isa)
    want = nn.functional.conv2d(
        x.double(), weight.double(), given if given is None else given.double(), stride, padding,
        dilation, x.shape[1],
    )  # fmt: skip
    assert got.dtype == dtype
    assert_near(got, want, atol=SLACK[dtype] * scale_of(want))


@crossed(isa=ISAS, dtype=SLACK, name=CASES)
def test_gradients_of_images_against_eager(name: str, dtype: torch.dtype, isa: str) -> None:
    if name == "no results":
        pytest.skip("eager PyTorch refuses it")
    dy, x = numbers(name, dtype)
    weight, _ = weight_of(name, dtype)
    _, stride, padding, dilation = map(list, CASES[name][1:])
    got = convolved(name, dy, weight, None, x, isa, transposed=1)
    want, _, _ = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight.double(), None, stride, padding, dilation, False, [0, 0],
        x.shape[1], [True, False, False],
    )  # fmt: skip
    assert_near(got, want, atol=SLACK[dtype] * scale_of(want))


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("taps", range(1, 9))
def test_windows_of_all_widths(
    taps: int, stride: int, transposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are shorter and longer than those that the kernel computes at once."""
    for columns in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33):
        for pad in {0, taps // 2}:
            if columns + 2 * pad < taps:
                continue
            case = ((1, 19, 4, columns), (2, taps), (1, stride), (1, pad), (1, 1))
            monkeypatch.setitem(CASES, "this", case)
            dy, x = numbers("this", torch.float64)
            weight, bias = weight_of("this", torch.float64)
            y = nn.functional.conv2d(x.requires_grad_(), weight, bias, *case[2:], groups=19)
            (dx,) = torch.autograd.grad(y, x, dy)
            if transposed:
                got, want = convolved("this", dy, weight, None, x.detach(), transposed=1), dx
            else:
                got, want = convolved("this", x.detach(), weight, bias, dy), y.detach()
            assert_near(got, want, atol=1e-12)


def test_convolutions_of_parts_of_images() -> None:
    dy, x = numbers("7x7", torch.float32)
    weight, bias = weight_of("7x7", torch.float32)
    wide = torch.randn(4, 20, 20, 33)
    wide[:, 2:18, 1:17, 1:] = x.permute(0, 2, 3, 1)
    part = wide[:, 2:18, 1:17, 1:].permute(0, 3, 1, 2)
    want = convolved("7x7", x, weight, bias, dy)
    assert torch.equal(convolved("7x7", part, weight, bias, dy), want)


@pytest.mark.parametrize("transposed", [0, 1])
def test_weights_of_any_strides(transposed: int) -> None:
    dy, x = numbers("all of both", torch.float32)
    if transposed:
        dy, x = x, dy
    weight, _ = weight_of("all of both", torch.float32)
    turned = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    gaps = torch.stack([weight, torch.zeros_like(weight)], 1)[:, 0]
    blur = weight[:1].expand_as(weight)
    for each in (turned, gaps, blur):
        want = convolved("all of both", x, each.contiguous(), None, dy, transposed=transposed)
        got = convolved("all of both", x, each, None, dy, transposed=transposed)
        assert torch.equal(got, want)


def test_an_infinity_reaches_the_places_that_read_it() -> None:
    dy, x = numbers("7x7", torch.float32)
    weight, _ = weight_of("7x7", torch.float32)
    x[1, 3, 0, 0] = float("inf")
    reached = ~convolved("7x7", x, weight, None, dy).isfinite()
    assert reached[1, 3, :4, :4].all()
    assert reached.sum() == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["7x7", "some channels of a block", "stride"])
def test_a_tap_that_is_not_finite_reaches_what_it_weighs(
    name: str, number: float, dtype: torch.dtype
) -> None:
    near = {"rtol": max(1e-5, SLACK[dtype] * 2), "atol": max(2e-5, SLACK[dtype] * 4)}
    dy, x = numbers(name, dtype)
    weight, bias = weight_of(name, dtype)
    weight[0, 0, 1, 0], weight[1, 0, 2, -1] = number, -number
    _, stride, padding, dilation = map(list, CASES[name][1:])
    channels = x.shape[1]
    got = convolved(name, x, weight, bias, dy)
    # In float64 eager PyTorch multiplies the zeros beside the image, too.
    operands = (each.float() for each in (x, weight, bias))
    want = nn.functional.conv2d(*operands, stride, padding, dilation, channels)
    torch.testing.assert_close(got.float(), want, **near, equal_nan=True)
    got = convolved(name, dy, weight, None, x, transposed=1)
    want, _, _ = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight.double(), None, stride, padding, dilation, False, [0, 0],
        channels, [True, False, False],
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, **near, equal_nan=True)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["7x7", "some channels of a block", "stride"])
def test_a_gradient_that_is_not_finite_reaches_its_taps(name: str, number: float) -> None:
    dy, x = numbers(name, torch.float32)
    dy[1, 3, 0, 0], dy[0, 2, -1, -1] = number, -number
    (got,) = kernel(name, dy, x, False)
    # In float64 eager PyTorch multiplies the zeros beside the image, too.
    want, _ = eager(name, dy, x, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [
        "7x7", "some channels of a block", "stride", "one pixel", "one row",
        "one row, with many taps",
    ],
)  # fmt: skip
def test_convolutions_with_any_number_of_threads(name: str) -> None:
    dy, x = numbers(name, torch.float32)
    weight, bias = weight_of(name, torch.float32)
    assert_same_bits_for_any_threads(
        lambda: (
            convolved(name, x, weight, bias, dy),
            convolved(name, dy, weight, None, x, transposed=1),
        )
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strides": [2, 2]}, "the operands do not fit together"),
        ({"strides": [0, 1]}, "strides: got 0, want 1 to 1048576"),
        ({"pads": [8, 3]}, "pads: got 8, want at most the 7 pixels that a window reaches over"),
        ({"dilations": [1]}, "dilations: got 1 numbers, want 2"),
    ],
    ids=str,
)
def test_convolutions_that_do_not_fit_their_operands(change: dict, words: str) -> None:
    dy, x = numbers("7x7", torch.float32)
    weight, bias = weight_of("7x7", torch.float32)
    for settings in (change, change | {"transposed": 1}):
        with pytest.raises(_C.InternalError, match=words):
            convolved("7x7", x, weight, None, dy, **settings)
    none, y = weight[:, :, :0], torch.randn(4, 32, 23, 16).contiguous(memory_format=LAST)
    with pytest.raises(_C.InternalError, match="windows: got 0 taps, want 1 to 1048576"):
        convolved("7x7", x, none, None, y)
    wide = {"strides": [1, 2**20], "pads": [0, 0], "dilations": [1, 1000]}
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        convolved("7x7", x, weight, None, dy[:, :, :10, :1], **wide)
    with pytest.raises(_C.InternalError, match="a bias of another size than that of 32 channels"):
        convolved("7x7", x, weight, bias[:5], dy)
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        convolved("7x7", x, weight[:5], None, dy)


# ---- as the passes write them --------------------------------------------------------------------


class Block(nn.Module):
    """ConvNeXt's: pixels are transposed for the layers on channels, and back."""

    def __init__(self, width: int, window: int, bias: bool = True) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            width, width, window, padding=window // 2, groups=width, bias=bias
        )
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.down(nn.functional.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(2, 24, 10, 9), (1, 8, 7, 7)])
def test_training(size: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, size[1], 1), Block(size[1], 7, bias), Block(size[1], 5, bias)
    )
    exact, x = copy.deepcopy(model).double(), torch.randn(size[0], 3, *size[2:])
    report = torch_ort.explain(copy.deepcopy(model), x)
    assert report.graphs[0].nodes["torch_ort.DepthwiseWeightGrad"] >= 1
    compiled = torch.compile(model, backend="ort")
    for step in range(3):
        y, want = compiled(x), exact(x.double())
        assert y.stride() == model(x).stride()
        assert_near(y.detach(), want.detach(), atol=1e-5)
        y.square().mean().backward()
        want.square().mean().backward()
        compare_gradients(model, exact, atol=2e-6 * (step + 1))


@pytest.mark.usefixtures("few_registers")
@pytest.mark.parametrize("window", [3, 7])
@pytest.mark.parametrize("wide", [False, True], ids=["images", "images and weights"])
def test_images_that_the_caller_gives_with_channels_last(window: int, wide: bool) -> None:
    """PyTorch's gradients of weights then have strides of channels last, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Conv2d(16, 16, window, padding=1, groups=16), nn.ReLU())
    if wide:
        model.to(memory_format=LAST)
    theirs, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = last(torch.randn(2, 16, 11, 9))
    report = torch_ort.explain(copy.deepcopy(model), x)
    assert report.graphs[0].nodes["torch_ort.DepthwiseWeightGrad"] == 1
    torch.compile(model, backend="ort")(x).square().mean().backward()
    theirs(x).square().mean().backward()
    exact(x.double()).square().mean().backward()
    for got, eager, want in zip(*map(nn.Module.parameters, (model, theirs, exact)), strict=True):
        assert_near(got.grad, want.grad, atol=2e-6)
        assert got.grad.stride() == eager.grad.stride()


@pytest.mark.usefixtures("many_registers")
def test_small_windows_are_left_to_pytorch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), Block(16, 3))
    report = torch_ort.explain(model, torch.randn(2, 3, 8, 8))
    assert report.graphs[0].nodes["torch_ort.DepthwiseWeightGrad"] == 0


def test_the_processor_decides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=16))
    report = torch_ort.explain(model, torch.randn(2, 3, 8, 8))
    is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    is_own = is_amd or _C.isa_names()[-1] == "avx2"
    assert bool(report.graphs[0].nodes["torch_ort.DepthwiseConvolution"]) == is_own


class Reduced(nn.Module):
    """MobileNet's: more channels, each by itself to a smaller image, and fewer again."""

    def __init__(self, width: int, settings: dict[str, int], transposed: bool) -> None:
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.up = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.each = kind(2 * width, 2 * width, **settings, groups=2 * width)
        self.norm, self.down = nn.BatchNorm2d(2 * width), nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.each(self.up(x))).relu())


@pytest.mark.usefixtures("few_registers")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 5, "padding": 4, "dilation": 2},
        {"kernel_size": 2, "stride": 3},
    ],
    ids=str,
)
def test_training_on_a_processor_with_few_registers(settings: dict, transposed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 1), Reduced(12, settings, transposed), nn.ReLU())
    exact, x = copy.deepcopy(model).double(), torch.randn(3, 3, 13, 10)
    nodes = torch_ort.explain(copy.deepcopy(model), x).graphs[0].nodes
    assert nodes["torch_ort.DepthwiseConvolution"] == 2
    compiled = torch.compile(model, backend="ort")
    for step in range(3):
        y, want = compiled(x), exact(x.double())
        assert_near(y.detach(), want.detach(), atol=1e-5)
        y.square().mean().backward()
        want.square().mean().backward()
        compare_gradients(model, exact, atol=4e-6 * (step + 1))


@pytest.mark.usefixtures("few_registers")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_in_short_floats(dtype: torch.dtype, autocast: bool) -> None:
    """No farther from float64 than eager PyTorch, whose kernels round as often."""
    torch.manual_seed(0)
    settings = {"kernel_size": 3, "padding": 1, "stride": 2}
    model = nn.Sequential(nn.Conv2d(3, 12, 1), Reduced(12, settings, False), Block(12, 7))
    exact, x = copy.deepcopy(model).double(), torch.randn(3, 3, 13, 10)
    model = model if autocast else model.to(dtype)
    x = x if autocast else x.to(dtype)
    eager = copy.deepcopy(model)

    def train(run, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=autocast and run is not exact):
            y = run(x)
        y.to(torch.promote_types(y.dtype, torch.float32)).square().mean().backward()
        return y.detach()

    with torch.autocast("cpu", dtype, enabled=autocast):
        nodes = torch_ort.explain(copy.deepcopy(model), x).graphs[0].nodes
    if dtype == torch.bfloat16:  # images of float16 stay as PyTorch lays them
        assert nodes["torch_ort.DepthwiseConvolution"] == 4
        assert nodes["torch_ort.DepthwiseWeightGrad"] == 2
    got, theirs = train(torch.compile(model, backend="ort"), x), train(eager, x)
    want = train(exact, x.double())
    assert got.dtype == theirs.dtype
    assert distance(got, want) <= 1.5 * distance(theirs, want)
    off = allowed = 0.0
    for ours, plain, truth in zip(*map(nn.Module.parameters, (model, eager, exact)), strict=True):
        assert ours.grad.dtype == plain.grad.dtype
        off += distance(ours.grad, truth.grad)
        allowed += distance(plain.grad, truth.grad)
    assert off <= 1.5 * allowed


def distance(got: Tensor, want: Tensor) -> float:
    """Give the root of the squared errors, in parts of what they are errors of."""
    return float((got.double() - want).norm() / want.norm())


class Blurred(nn.Module):
    """Joins an image, as each channel by itself is convolved with the same weight, with another."""

    def __init__(self, is_joined: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 8, 1), nn.Conv2d(8 + 4 * is_joined, 5, 1)
        self.weight = nn.Parameter(torch.randn(1, 1, 3, 3))
        self.is_joined = is_joined

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = self.before(x).relu()
        x = nn.functional.conv2d(x, self.weight.expand(8, 1, 3, 3), padding=1, groups=8)
        return self.after(torch.cat([x, other], 1).sin()) if self.is_joined else self.after(x)


@pytest.mark.usefixtures("few_registers")
@pytest.mark.parametrize("is_joined", [False, True])
def test_one_weight_for_all_channels(is_joined: bool) -> None:
    torch.manual_seed(0)
    model = Blurred(is_joined)
    exact, inputs = (
        copy.deepcopy(model).double(),
        (torch.randn(2, 3, 9, 8), torch.randn(2, 4, 9, 8)),
    )
    torch.compile(model, backend="ort")(*inputs).square().mean().backward()
    exact(*(each.double() for each in inputs)).square().mean().backward()
    compare_gradients(model, exact, atol=4e-6)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.usefixtures("few_registers")
def test_joined_with_a_row_major_image() -> None:
    torch.manual_seed(0)
    each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    exact = copy.deepcopy(each).double()
    x, other = torch.randn(2, 8, 9, 8).contiguous(memory_format=LAST), torch.randn(2, 4, 9, 8)

    def joined(run: nn.Module, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat([run(x), other], 1)

    got = torch.compile(joined, backend="ort")(each, x, other)
    assert_near(got.detach(), joined(exact, x.double(), other.double()).detach(), atol=1e-5)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.usefixtures("few_registers")
def test_rows_that_no_window_reaches_are_left_to_pytorch() -> None:
    torch.manual_seed(0)
    settings = {"kernel_size": 3, "padding": 1, "dilation": 2, "output_padding": 1}
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Reduced(8, settings, True))
    compare_at_sizes(model, [(2, 3, 9, 9)], atol=2e-5)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.usefixtures("few_registers")
def test_images_of_other_sizes() -> None:
    torch.manual_seed(0)
    settings = {"kernel_size": 3, "padding": 1, "stride": 2}
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Reduced(8, settings, False))
    sizes = [(2, 3, 9, 9), (1, 3, 16, 5), (3, 3, 4, 33)]
    compare_at_sizes(model, sizes, atol=2e-5)


@pytest.mark.usefixtures("few_registers")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: type) -> None:
    torch.manual_seed(0)
    settings = {"kernel_size": 3, "padding": 1}
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Reduced(8, settings, False)).eval()
    x = torch.randn(2, 3, 9, 8)
    with mode():
        got = torch.compile(model, backend="ort")(x)
        assert_near(got, copy.deepcopy(model).double()(x.double()), atol=1e-5)
