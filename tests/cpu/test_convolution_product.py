"""Convolutions by the engine's product, and the gradients of their images, against float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator

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
    compare_frozen,
    compare_training,
    compare_two_calls,
    last,
    last_strides,
)
from tests.cpu.regions import ISAS, assert_near, crossed, read, run, type_text
from torch_ort import _C

# As those of other kernels, and what only the blocks of this one divide. With a small cache a block
# has 128 columns and 512 steps.
BLOCKS = {
    "more channels and columns than a block has":
        ((2, 150, 7, 8), (300, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "more taps than a block has": ((1, 17, 9, 12), (40, 1), (9, 11), (2, 1), (4, 5), (1, 1)),
    "more places than are multiplied at once":
        ((3, 4, 31, 29), (5, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "pixels that no window reaches": ((2, 16, 9, 10), (20, 1), (2, 1), (3, 2), (0, 0), (1, 1)),
}  # fmt: skip
ALL = CASES | BLOCKS
SMALL_CACHE = (32 << 10, 1 << 19)


@pytest.fixture
def small_cache() -> Iterator[None]:
    _C.testing.plant_caches(SMALL_CACHE)
    yield
    _C.testing.plant_caches(None)


def weight_of(case: tuple, dtype: torch.dtype = torch.float32) -> Tensor:
    (_, channels, *_), (rows, groups), window, *_ = case
    return torch.randn(rows, channels // groups, *window, dtype=dtype)


def kernel(
    case: tuple, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, isa: str = "", **attrs
) -> Tensor:
    """Run the kernel; `y` says the sizes of its result."""
    given = {"x": x, "w": weight} | ({} if bias is None else {"b": bias})
    node = f"y = torch_ort.Convolution <{settings_text(case, **attrs)}> ({', '.join(given)})"
    inputs = {each: type_text(value.dtype, value.shape) for each, value in given.items()}
    types, strides = {"y": type_text(y.dtype, y.shape)}, {"y": last_strides(y.shape)}
    return run(read(inputs, [node], ["y"], types=types, strides=strides), given, isa)[0]


def eager(case: tuple, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _, (_, groups), _, stride, padding, dilation = case
    convolve = nn.functional.conv2d if x.dim() == 4 else nn.functional.conv3d
    bias = None if bias is None else bias.double()
    return convolve(x.double(), weight.double(), bias, stride, padding, dilation, groups)


def eager_of_image(case: tuple, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    _, (_, groups), _, stride, padding, dilation = case
    dx, _, _ = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight.double(), None, list(stride), list(padding), list(dilation),
        False, [0 for _ in stride], groups, [True, False, False],
    )  # fmt: skip
    return dx


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """Of sums of so many products of normally distributed numbers."""
    return (4e-6 if dtype == torch.float32 else 1e-14) * max(terms, 4) ** 0.5


def check(case: tuple, dtype: torch.dtype, has_bias: bool, isa: str) -> None:
    dy, x = numbers(case, dtype)
    weight = weight_of(case, dtype)
    rows, taps = weight.shape[0], weight[0, 0].numel()
    bias = torch.randn(rows, dtype=dtype) if has_bias else None
    got = kernel(case, x, weight, bias, dy, isa)
    assert got.dtype == dtype
    assert_near(got, eager(case, x, weight, bias), atol=tolerance(dtype, taps * weight.shape[1]))
    got = kernel(case, dy, weight, None, x, isa, transposed=1)
    assert_near(got, eager_of_image(case, dy, x, weight), atol=tolerance(dtype, taps * rows))


@crossed(isa=ISAS, dtype=(torch.float32, torch.float64), has_bias=(False, True), name=ALL)
def test_against_eager(
    name: str, has_bias: bool, dtype: torch.dtype, isa: str, small_cache: None
) -> None:
    torch.manual_seed(0)
    if name == "no rows":
        pytest.skip("eager PyTorch refuses it")
    check(ALL[name], dtype, has_bias, isa)


@settings(max_examples=150, deadline=None)
@given(case=any_case(40, 40), has_bias=st.booleans(), isa=st.sampled_from(ISAS))
def test_any_sizes(case: tuple, has_bias: bool, isa: str) -> None:
    check(case, torch.float32, has_bias, isa)


@pytest.mark.parametrize("name", ["no rows", "no images"])
def test_nothing_to_multiply(name: str) -> None:
    """Without channels of the image that is summed over, a result is its bias, or zeros."""
    dy, x = numbers(CASES[name])
    weight = weight_of(CASES[name])
    assert kernel(CASES[name], x, weight, None, dy).shape == dy.shape
    assert not kernel(CASES[name], dy, weight, None, x, transposed=1).any()
    bias = torch.randn(x.shape[1])
    got = kernel(CASES[name], dy, weight, bias, x, transposed=1)
    assert torch.equal(got, bias.view(1, -1, 1, 1).expand(x.shape))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bias_of_a_transposed_convolution(transposed: bool, isa: str) -> None:
    torch.manual_seed(0)
    case = ALL["pixels that no window reaches"]
    dy, x = numbers(case)
    weight, bias = weight_of(case), torch.randn(x.shape[1])
    want = eager_of_image(case, dy, x, weight) + bias.double().view(1, -1, 1, 1)
    got = kernel(case, dy, weight, bias, x, isa, transposed=1)
    assert_near(got, want, atol=2e-5)


@pytest.mark.parametrize("name", ["3x3", "groups", "all of both", "strides of volumes"])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_with_channels_last(name: str, transposed: bool) -> None:
    """Bits are those of row-major weights."""
    case = CASES[name]
    dy, x = numbers(case)
    weight = weight_of(case)
    images = (dy, x) if transposed else (x, dy)
    got, want = (
        kernel(case, images[0], each, None, images[1], transposed=int(transposed))
        for each in (last(weight), weight)
    )
    assert torch.equal(got, want)


def test_parts_of_images() -> None:
    """Pixels of the image may be apart, and its channels among others."""
    case = CASES["3x3"]
    dy, x = numbers(case)
    weight = weight_of(case)
    wide = torch.randn(2, 15, 14, 33)
    wide[:, 2:14, 1:12, 9:25] = x.permute(0, 2, 3, 1)
    part = wide[:, 2:14, 1:12, 9:25].permute(0, 3, 1, 2)
    assert torch.equal(kernel(case, part, weight, None, dy), kernel(case, x, weight, None, dy))


def test_infinities_reach_their_windows_alone() -> None:
    case = CASES["3x3"]
    dy, x = numbers(case)
    weight = weight_of(case)
    x[1, 3, 0, 0] = float("inf")
    reached = ~kernel(case, x, weight, None, dy).isfinite()
    assert reached[1, :, :2, :2].all()
    assert reached.sum() == 4 * 24


@pytest.mark.parametrize("name", [*BLOCKS, "groups", "all of both", "strides of volumes"])
@pytest.mark.parametrize("transposed", [False, True])
def test_same_bits_for_any_number_of_threads(
    name: str, transposed: bool, small_cache: None
) -> None:
    dy, x = numbers(ALL[name])
    weight = weight_of(ALL[name])
    images = (dy, x) if transposed else (x, dy)
    assert_same_bits_for_any_threads(
        lambda: [kernel(ALL[name], images[0], weight, None, images[1], transposed=int(transposed))]
    )


@pytest.mark.parametrize(("change", "words"), UNFIT, ids=str)
def test_nodes_that_do_not_fit_their_operands(change: dict, words: str) -> None:
    dy, x = numbers(CASES["3x3"])
    with pytest.raises(_C.InternalError, match=f"^Convolution: {words}"):
        kernel(CASES["3x3"], x, weight_of(CASES["3x3"]), None, dy, **change)


def test_other_operands_are_refused() -> None:
    case = CASES["3x3"]
    dy, x = numbers(case)
    weight = weight_of(case)
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        kernel(case, x.contiguous(), weight, None, dy)
    with pytest.raises(_C.InternalError, match="got a bias of another size than that of 24 chan"):
        kernel(case, x, weight, torch.randn(16), dy)
    with pytest.raises(_C.InternalError, match="want a weight whose taps are evenly apart"):
        kernel(case, x, weight.transpose(2, 3), None, dy)


# ---- as the pass writes it -----------------------------------------------------------------------


class Network(nn.Module):
    """Strides, single pixels with strides, dilation, groups, and a transposed convolution."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1, bias=bias)
        self.halve = nn.Conv2d(32, 48, 3, stride=2, padding=1, bias=bias)
        self.short = nn.Conv2d(32, 48, 1, stride=2, bias=bias)
        self.wide = nn.Conv2d(48, 32, 3, padding=2, dilation=2, groups=2, bias=bias)
        self.up = nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1, bias=bias)
        self.last = nn.Conv2d(16, 4, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = (self.halve(x) + self.short(x)).relu()
        return self.last(self.up(self.wide(x).sigmoid()).relu())


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(3, 16, 3, padding=1), nn.InstanceNorm3d(32)
        self.halve = nn.Conv3d(16, 32, 3, stride=(1, 2, 2), padding=1)
        self.up, self.last = nn.ConvTranspose3d(32, 16, 2, stride=2), nn.Conv3d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.halve(self.first(x).relu())).relu()
        return self.last(self.up(x).relu())


def count(model: nn.Module, x: Tensor) -> int:
    report = torch_ort.explain(copy.deepcopy(model), x)
    return report.graphs[0].nodes["torch_ort.Convolution"]


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["row-major weights", "channels-last weights"])
@pytest.mark.usefixtures("few_registers")
def test_training(bias: bool, wide: bool) -> None:
    torch.manual_seed(0)
    model, x = Network(bias), torch.randn(2, 3, 14, 18)
    if wide:
        model.to(memory_format=torch.channels_last)
    # Four layers, forward and back.
    assert count(model, x) == 8
    compare_training(model, x, 4e-6)


@pytest.mark.usefixtures("few_registers")
def test_other_sizes_of_images_and_batches() -> None:
    torch.manual_seed(0)
    compare_at_sizes(Network(), [(2, 3, 14, 18), (3, 3, 9, 20), (5, 3, 8, 7)], 4e-6)


@pytest.mark.usefixtures("few_registers")
def test_training_of_volumes() -> None:
    torch.manual_seed(0)
    model, x = Volumes(), torch.randn(2, 3, 6, 10, 9)
    assert count(model, x) == 4
    compare_at_sizes(model, [x.shape, (1, 3, 7, 8, 12)], 4e-6)


@pytest.mark.usefixtures("few_registers")
def test_frozen_weights_and_images_that_need_gradients() -> None:
    torch.manual_seed(0)
    model, x = Network(), torch.randn(2, 3, 14, 18)
    compare_frozen(model, x, [model.halve, model.up], 4e-6)


@pytest.mark.usefixtures("few_registers")
def test_two_calls_alive_at_once() -> None:
    torch.manual_seed(0)
    compare_two_calls(Network(), (2, 3, 14, 18))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.usefixtures("few_registers")
def test_evaluation(mode: type) -> None:
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(2, 3, 14, 18)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort")
    with mode():
        assert count(model, x) == 4
        for _ in range(2):
            assert_near(compiled(x), exact(x.double()), atol=1e-5)


@pytest.mark.usefixtures("few_registers")
def test_few_channels_and_short_floats_are_left_to_onednn() -> None:
    few = nn.Sequential(nn.Conv2d(32, 15, 3, stride=2), nn.ReLU(), nn.Conv2d(15, 32, 3, stride=2))
    assert count(few, torch.randn(2, 32, 14, 18)) == 0
    short = Network().bfloat16()
    assert count(short, torch.randn(2, 3, 14, 18, dtype=torch.bfloat16)) == 0


@pytest.mark.parametrize("stride", [1, 2], ids=["Winograd", "product"])
@pytest.mark.usefixtures("few_registers")
def test_weights_and_biases_that_are_views(stride: int) -> None:
    torch.manual_seed(0)
    x = last(torch.randn(2, 16, 19, 20))
    wide, biases = torch.randn(32, 16, 3, 5), torch.randn(32, 2)
    weights = [
        wide[..., 1:4],
        torch.randn(32, 16, 3, 3).mT,
        torch.randn(32, 16, 1, 3).expand(32, 16, 3, 3),
    ]

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.conv2d(x, weight, bias, stride=stride).relu()

    compiled = torch.compile(run, backend="ort")
    for weight in weights:
        for bias in (biases[:, 0], torch.randn(1).expand(32)):
            assert_near(
                compiled(x, weight, bias),
                run(x.double(), weight.double(), bias.double()),
                atol=2e-5,
            )


@pytest.mark.usefixtures("many_registers")
def test_processors_with_faster_kernels_leave_them_to_onednn() -> None:
    assert count(Network(), torch.randn(2, 3, 14, 18)) == 0
