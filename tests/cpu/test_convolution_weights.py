"""Gradients of the weights of convolutions by the engine's product, against PyTorch in float64."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_ort
from tests.cpu.convolution_cases import CASES, UNFIT, any_case, numbers, settings_text
from tests.cpu.gradients import (
    assert_same_bits_for_any_threads,
    compare_at_sizes,
    compare_gradients,
    compare_training,
    last_strides,
)
from tests.cpu.regions import ISAS, assert_near, crossed, read, run, type_text
from torch_ort import _C

PARTS = ["3x3", "more places, rows and columns than a block has", "groups", "all of both"]


def kernel(case: tuple, dy: Tensor, x: Tensor, isa: str = "", **attrs) -> Tensor:
    _, (rows, groups), window, *_ = case
    text = settings_text(case, **attrs)
    channels = x.shape[1] // groups
    sizes = (rows, channels, *window)
    graph = read(
        {"dy": type_text(dy.dtype, dy.shape), "x": type_text(x.dtype, x.shape)},
        [f"dw = torch_ort.ConvolutionWeightGrad <{text}> (dy, x)"],
        ["dw"],
        types={"dw": type_text(dy.dtype, sizes)},
        strides={"dw": last_strides(sizes)},
    )
    (got,) = run(graph, {"dy": dy, "x": x}, isa)
    return got


def eager(case: tuple, dy: Tensor, x: Tensor) -> Tensor:
    _, (rows, groups), window, stride, padding, dilation = case
    weight = torch.zeros(rows, x.shape[1] // groups, *window, dtype=torch.float64)
    _, dw, _ = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight, None, list(stride), list(padding), list(dilation), False,
        [0 for _ in stride], groups, [False, True, False],
    )  # fmt: skip
    return dw


def check(case: tuple, dtype: torch.dtype, isa: str) -> None:
    dy, x = numbers(case, dtype)
    got, want = kernel(case, dy, x, isa), eager(case, dy, x)
    assert got.dtype == dtype
    # Sums of so many products of normally distributed numbers.
    terms = dy.numel() // max(1, dy.shape[1])
    scale = max(1.0, terms**0.5, float(want.abs().max()) if want.numel() else 0.0)
    assert_near(got, want, atol=(4e-6 if dtype == torch.float32 else 1e-13) * scale)


@crossed(isa=ISAS, dtype=(torch.float32, torch.float64), name=CASES)
def test_against_eager(name: str, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    if name == "no rows":
        dy, x = numbers(CASES[name], dtype)
        assert kernel(CASES[name], dy, x, isa).shape == (0, 8, 3, 3)
        return
    check(CASES[name], dtype, isa)


@settings(max_examples=150, deadline=None)
@given(case=any_case(20, 14), isa=st.sampled_from(ISAS))
def test_any_sizes(case: tuple, isa: str) -> None:
    check(case, torch.float32, isa)


def test_parts_of_images() -> None:
    """Pixels of the image may be apart, and its channels among others."""
    case = CASES["3x3"]
    dy, x = numbers(case)
    wide = torch.randn(2, 15, 14, 33)
    wide[:, 2:14, 1:12, 9:25] = x.permute(0, 2, 3, 1)
    part = wide[:, 2:14, 1:12, 9:25].permute(0, 3, 1, 2)
    assert torch.equal(kernel(case, dy, part), kernel(case, dy, x))


def test_infinities_reach_their_taps_alone() -> None:
    case = CASES["3x3"]
    dy, x = numbers(case)
    x[1, 3, 0, 0] = float("inf")
    reached = ~kernel(case, dy, x).isfinite()
    # The first pixel is under these taps of some place, for each row of the weight.
    assert reached[:, 3, :2, :2].all()
    assert reached.sum() == 4 * 24


@pytest.mark.parametrize("name", PARTS)
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    dy, x = numbers(CASES[name])
    assert_same_bits_for_any_threads(lambda: [kernel(CASES[name], dy, x)])


@pytest.mark.parametrize(("change", "words"), UNFIT, ids=str)
def test_nodes_that_do_not_fit_their_operands(change: dict, words: str) -> None:
    dy, x = numbers(CASES["3x3"])
    with pytest.raises(_C.InternalError, match=f"^ConvolutionWeightGrad: {words}"):
        kernel(CASES["3x3"], dy, x, **change)


def test_gradients_with_gaps_and_row_major_images_are_refused() -> None:
    dy, x = numbers(CASES["3x3"])
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        kernel(CASES["3x3"], dy, x.contiguous())
    wide = torch.randn(2, 12, 11, 30).permute(0, 3, 1, 2)[:, :24]
    with pytest.raises(_C.InternalError, match="want a gradient and weights that are channels-l"):
        kernel(CASES["3x3"], wide, x)


# ---- as the pass writes it -----------------------------------------------------------------------


def network(bias: bool = True, channels: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=bias), nn.ReLU(),
        nn.Conv2d(channels, 24, 3, stride=2, padding=1, bias=bias), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 32, (5, 3), padding=(2, 1), bias=bias, dilation=(1, 1)), nn.ReLU(),
        nn.Conv2d(32, 8, 1, bias=bias),
    )  # fmt: skip


def volumes(bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 24, 3, padding=1, bias=bias), nn.LeakyReLU(),
        nn.Conv3d(24, 32, 3, stride=(1, 2, 2), padding=1, bias=bias), nn.InstanceNorm3d(32),
        nn.ReLU(), nn.Conv3d(32, 24, 3, padding=1, bias=bias), nn.ReLU(),
        nn.Conv3d(24, 20, (3, 1, 3), stride=2, bias=bias), nn.ReLU(),
        nn.Conv3d(20, 4, 1, bias=bias),
    )  # fmt: skip


def num_kernels(model: nn.Module, x: Tensor) -> int:
    report = torch_ort.explain(copy.deepcopy(model), x)
    return report.graphs[0].nodes["torch_ort.ConvolutionWeightGrad"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("few_registers")
def test_training(bias: bool) -> None:
    torch.manual_seed(0)
    model, x = network(bias), torch.randn(2, 3, 14, 13)
    # Images of three channels, and windows of one pixel, are left to oneDNN.
    assert num_kernels(model, x) == 2
    compare_training(model, x, 3e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("few_registers")
def test_training_of_volumes(bias: bool) -> None:
    torch.manual_seed(0)
    model, x = volumes(bias), torch.randn(2, 3, 6, 10, 9)
    # The rest are of three channels, of windows of one pixel, and by Winograd's algorithm.
    assert num_kernels(model, x) == 2
    compare_at_sizes(model, [x.shape, (1, 3, 7, 8, 12)], 3e-6)


@pytest.mark.usefixtures("few_registers")
def test_other_sizes_of_images_and_batches() -> None:
    torch.manual_seed(0)
    compare_at_sizes(network(), [(2, 3, 14, 13), (3, 3, 9, 20), (5, 3, 7, 7)], 3e-6)


@pytest.mark.usefixtures("few_registers")
def test_a_weight_alone_has_a_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 4, 3))
    model[0].bias.requires_grad_(False)
    exact, x = copy.deepcopy(model).double(), torch.randn(2, 16, 8, 9)
    torch.compile(model, backend="ort")(x).square().mean().backward()
    exact(x.double()).square().mean().backward()
    compare_gradients(model, exact, 3e-6)


@pytest.fixture(params=["few_registers", "many_registers"])
def registers(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue(request.param)
    return request.param


def nodes_and_gradients(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Train a step, compare it with float64, and give what its graph consists of."""
    nodes = torch_ort.explain(copy.deepcopy(model), x).graphs[0].nodes
    exact = copy.deepcopy(model).double()
    torch.compile(model, backend="ort")(x).square().mean().backward()
    exact(x.double()).square().mean().backward()
    compare_gradients(model, exact, 3e-6)
    return nodes


def test_weights_larger_than_images(registers: str) -> None:
    """Only the gradient of a weight is slower channels-last, and only with oneDNN."""
    torch.manual_seed(0)
    layers = [(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*itertools.chain(*layers))
    nodes = nodes_and_gradients(model, torch.randn(2, 64, 3, 3))
    is_few = registers == "few_registers"
    assert nodes["torch_ort.ConvolutionWeightGrad"] == (4 if is_few else 0)


class Shortcut(nn.Module):
    """A residual block that halves an image of few channels, and a convolution that doubles it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(5, 4, 3)
        self.main = nn.Conv2d(channels, 20, 3, stride=2, padding=1)
        self.short = nn.Conv2d(channels, 20, 1, stride=2)
        self.wider = nn.ConvTranspose2d(20, 5, 1, stride=2, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).relu()
        return self.after(self.wider((self.main(x) + self.short(x)).relu()).relu())


@pytest.mark.parametrize("channels", [2, 7, 15])
def test_few_channels_of_every_second_pixel(registers: str, channels: int) -> None:
    """Here oneDNN's kernel of channels-last images writes beyond its memory, in eager, too."""
    torch.manual_seed(0)
    nodes = nodes_and_gradients(Shortcut(channels), torch.randn(4, 3, 64, 64))
    assert nodes["torch_ort.ConvolutionWeightGrad"] == 2


def test_large_convolutions_of_single_pixels(registers: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 80, 1), nn.ReLU(), nn.Conv2d(80, 16, 3, padding=1),
    )  # fmt: skip
    nodes = nodes_and_gradients(model, torch.randn(4, 3, 64, 64))  # 2^26.3 multiplications
    products = nodes["MatMul"] + nodes["Gemm"]
    assert products == (3 if registers == "few_registers" else 0)
