"""Convolutions of single pixels as products: numbers, gradients, choices, sizes that change."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from comparison import assert_as_exact_as_eager
from torch import Tensor, nn

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.ort_only


class Bottleneck(nn.Module):
    """A convolution between two of single pixels, with a way past them."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.GELU(),
            nn.Conv2d(inner, inner, 3, padding=1), nn.GELU(),
            nn.Conv2d(inner, channels, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


class Gated(nn.Module):
    """Channels weighed by what they hold on the whole, through images of one pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.narrow(x.mean((2, 3), keepdim=True)).tanh()
        return x * self.widen(gate).sigmoid()


def chain(*layers: nn.Module) -> nn.Module:
    """Layers between two convolutions of larger windows, which want channels last."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *layers, nn.LazyConv2d(8, 3, padding=1), nn.Tanh(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


# With the number of convolutions of single pixels.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "bottleneck": (lambda: chain(Bottleneck(16, 8), Bottleneck(16, 24)), 4),
    "gate": (lambda: chain(Gated(16)), 2),
    "one_after_the_other": (lambda: chain(nn.Conv2d(16, 24, 1), nn.Conv2d(24, 8, 1)), 2),
    "to_one_channel": (lambda: chain(nn.Conv2d(16, 1, 1), nn.Tanh()), 1),
    "from_one_channel": (lambda: chain(nn.Conv2d(16, 1, 3), nn.Conv2d(1, 16, 1)), 1),
    "norm": (lambda: chain(nn.GroupNorm(4, 16), nn.Conv2d(16, 24, 1), nn.SiLU()), 1),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        model(torch.zeros(4, 3, 12, 12))  # makes the lazy layers
    return model


def convolutions(call: Callable, *inputs: Tensor) -> Counter[str]:
    """Count the convolutions and their gradients that a training step is left with."""
    with watchers.watching() as programs:
        call(*inputs).float().sum().backward()
    (program,) = programs
    kinds = [node["attrs"].get("operator", node["op"]) for node in program.graph.nodes()]
    return Counter(kind for kind in kinds if "conv" in kind.lower())


@pytest.fixture(autouse=True)
def clean() -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()


@pytest.mark.parametrize("size", [(4, 3, 12, 12), (1, 3, 13, 10), (0, 3, 12, 12)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_against_float64(name: str, size: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    model = make(name)
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    if size[0] > 0:
        assert_as_exact_as_eager(model, compiled, torch.randn(size))
        return
    x = torch.randn(size, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad.shape == x.shape
    assert not any(p.grad.any() for p in compiled.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_many_sizes_through_one_graph(name: str, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    model = make(name)
    call = torch_ort.ORTModule(copy.deepcopy(model))
    for size in [(4, 3, 12, 12), (1, 3, 13, 10), (2, 3, 9, 17), (5, 3, 10, 10)]:
        assert_as_exact_as_eager(model, call, torch.randn(size))
    assert torch_ort.counters()["graphs_captured"] == 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("many_registers")
def test_they_are_products(name: str, monkeypatch) -> None:
    model, x = make(name), torch.randn(4, 3, 12, 12)
    with_pass = convolutions(torch.compile(model, backend="ort"), x)
    monkeypatch.setenv("TORCH_ORT_DISABLE", "multiply_pixels")
    torch.compiler.reset()
    without = convolutions(torch.compile(model, backend="ort"), x)
    count = MODELS[name][1]
    assert without - with_pass == {"Conv": count, "aten::convolution_backward": count}


def test_a_model_that_is_channels_last_already() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 8, 1), nn.Tanh())
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    assert convolutions(compiled, x) == {"Conv": 1, "aten::convolution_backward": 1}
    compiled.zero_grad()
    assert compiled(x).is_contiguous(memory_format=torch.channels_last)
    assert_as_exact_as_eager(model, compiled, x)
    for mine, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 1, stride=2), nn.Conv2d(16, 16, 1, padding=1),
        nn.Conv2d(16, 16, 1, groups=4), nn.ConvTranspose2d(16, 16, 1),
    ],
    ids=["stride", "padding", "groups", "transposed"],
)  # fmt: skip
@pytest.mark.usefixtures("many_registers")
def test_what_stays_a_convolution(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), layer, nn.Conv2d(16, 8, 3))
    found = convolutions(torch.compile(model, backend="ort"), torch.randn(4, 3, 12, 12))
    assert found["Conv"] + found["ConvTranspose"] == found["aten::convolution_backward"] == 3


@pytest.mark.parametrize(
    ("size", "dtype", "is_product"),
    [(32, torch.float32, True), (34, torch.float32, False), (34, torch.bfloat16, True)],
)
@pytest.mark.usefixtures("many_registers")
def test_large_ones_of_float32_stay_convolutions(
    size: int, dtype: torch.dtype, is_product: bool
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU(),
        nn.Conv2d(64, 4, 3),
    ).to(dtype)  # fmt: skip
    x = torch.randn(16, 3, size, size, dtype=dtype)
    found = convolutions(torch.compile(model, backend="ort"), x)
    assert found["Conv"] == (2 if is_product else 3)


def test_eagers_own_bits_come_from_the_convolution(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_DISABLE", "own_kernels")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 8, 1), nn.Tanh(), nn.Conv2d(8, 4, 1))
    x = torch.randn(4, 16, 1, 1)
    found = convolutions(torch.compile(model, backend="ort"), x)
    assert found == {"Conv": 2, "aten::convolution_backward": 2}
    model.zero_grad()
    torch.compiler.reset()
    compiled = copy.deepcopy(model)
    got, want = torch.compile(compiled, backend="ort")(x), model(x)
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    pairs = zip(compiled.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
