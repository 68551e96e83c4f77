"""Gradients of convolutions of each channel by itself, against eager PyTorch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import torch_ort
from tests.cpu.gradients import compare_gradients, result_size
from tests.cpu.regions import ISAS, assert_near, crossed, read, run, type_text
from torch_ort import _C

# Batch, channels, height, width; window, stride, padding, dilation.
CASES = {
    "7x7": ((4, 32, 16, 16), (7, 7), (1, 1), (3, 3), (1, 1)),
    "some channels of a block": ((3, 20, 9, 13), (5, 5), (1, 1), (2, 2), (1, 1)),
    "stride": ((2, 16, 8, 9), (7, 7), (2, 3), (3, 3), (1, 1)),
    "dilation": ((2, 5, 19, 17), (7, 7), (1, 1), (0, 0), (2, 2)),
    "all of both": ((3, 40, 11, 10), (5, 3), (2, 1), (4, 1), (2, 3)),
    "one pixel": ((16, 128, 1, 1), (7, 7), (1, 1), (3, 3), (1, 1)),
    "more taps than a register holds": ((2, 3, 30, 31), (9, 11), (3, 2), (5, 6), (1, 1)),
    "one channel": ((2, 1, 6, 6), (4, 4), (1, 1), (1, 1), (1, 1)),
    "no images": ((0, 8, 6, 6), (5, 5), (1, 1), (2, 2), (1, 1)),
    "no results": ((2, 8, 3, 3), (4, 3), (1, 1), (0, 0), (1, 1)),
}
LAST = torch.channels_last


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


def eager(name: str, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    window, stride, padding, dilation = map(list, CASES[name][1:])
    channels = x.shape[1]
    weight = torch.zeros(channels, 1, *window, dtype=torch.float64)
    _, dw, db = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight, [channels], stride, padding, dilation, False, [0, 0],
        channels, [False, True, True],
    )  # fmt: skip
    return dw, db


@crossed(isa=ISAS, has_bias=(False, True), dtype=(torch.float32, torch.float64), name=CASES)
def test_against_eager(name: str, dtype: torch.dtype, has_bias: bool, isa: str) -> None:
    if name == "no results":
        pytest.skip("eager PyTorch refuses it")
    dy, x = numbers(name, dtype)
    got = kernel(name, dy, x, has_bias, isa)
    for found, want in zip(got, eager(name, dy, x), strict=False):
        assert found.dtype == dtype
        scale = float(want.abs().max()) if want.numel() else 1.0
        assert_near(found, want, atol=(4e-6 if dtype == torch.float32 else 1e-13) * max(scale, 1))


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
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(kernel(name, dy, x, True))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


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


# ---- as the pass writes it -----------------------------------------------------------------------


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


def test_small_windows_are_left_to_pytorch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), Block(16, 3))
    report = torch_ort.explain(model, torch.randn(2, 3, 8, 8))
    assert report.graphs[0].nodes["torch_ort.DepthwiseWeightGrad"] == 0
