"""Convolutions that cut images into patches: numbers, gradients, choices, sizes that change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from comparison import assert_as_exact_as_eager
from torch import Tensor, nn
from torch.nn import functional

import torch_ort
from torch_ort.engine import watchers

pytestmark = [pytest.mark.ort_only, pytest.mark.usefixtures("few_registers")]


class Norm(nn.LayerNorm):
    """Of the channels of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def of_planes(first: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(
        first, Norm(channels), nn.Conv2d(channels, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 8, 1)
    )


def of_volumes(first: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(
        first,
        nn.GELU(),
        nn.Conv3d(channels, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv3d(16, 16, 3, padding=1),
        nn.Tanh(),
    )


# With the shape of images.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "squares": (lambda: of_planes(nn.Conv2d(3, 32, 4, 4), 32), (4, 3, 16, 24)),
    "without_a_bias": (lambda: of_planes(nn.Conv2d(3, 32, 4, 4, bias=False), 32), (4, 3, 16, 16)),
    "one_channel": (lambda: of_planes(nn.Conv2d(1, 16, 12, 12), 16), (2, 1, 24, 36)),
    "tall": (
        lambda: of_planes(nn.Conv2d(4, 24, (7, 6), (3, 6), padding=(3, 0)), 24),
        (3, 4, 13, 18),
    ),
    "few_in_a_row": (lambda: of_planes(nn.Conv2d(4, 32, 2, 2), 32), (4, 4, 8, 12)),
    "rows_apart": (
        lambda: of_planes(nn.Conv2d(5, 20, (3, 4), (2, 4), dilation=(2, 1)), 20),
        (3, 5, 14, 12),
    ),
    "one_row": (lambda: of_planes(nn.Conv2d(3, 16, (1, 4), (1, 4)), 16), (2, 3, 5, 12)),
    "volumes": (lambda: of_volumes(nn.Conv3d(2, 16, (1, 4, 6), (1, 4, 6)), 16), (2, 2, 4, 32, 48)),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, size = MODELS[name]
    return model(), torch.randn(size)


def kinds_of(call: Callable, x: Tensor) -> list[str]:
    """List the kinds of nodes that a training step is left with."""
    torch.compiler.reset()
    with watchers.watching() as programs:
        call(x).float().sum().backward()
    (program,) = programs
    return [node["attrs"].get("operator", node["op"]) for node in program.graph.nodes()]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.compiler.reset()
    torch_ort.reset_counters()


@pytest.mark.parametrize("name", MODELS)
def test_training_against_float64(name: str) -> None:
    model, x = make(name)
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    assert_as_exact_as_eager(model, compiled, x)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_images_alone(name: str) -> None:
    model, x = make(name)
    model.requires_grad_(requires_grad=False)
    compiled, exact = torch.compile(copy.deepcopy(model), backend="ort"), model.double()
    got, want = x.clone().requires_grad_(), x.double().requires_grad_()
    for _ in range(2):
        compiled(got).square().mean().backward()
        exact(want).square().mean().backward()
    torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-7)
    assert got.grad.stride() == got.stride()


@pytest.mark.parametrize("name", MODELS)
def test_images_without_elements(name: str) -> None:
    model, x = make(name)
    compiled = torch.compile(model, backend="ort")
    result = compiled(x[:0])
    result.sum().backward()
    assert result.shape[0] == 0
    assert not any(p.grad.any() for p in compiled.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_many_sizes_through_one_graph(name: str) -> None:
    model, x = make(name)
    call = torch_ort.ORTModule(copy.deepcopy(model))
    for count in (4, 1, 3):
        assert_as_exact_as_eager(model, call, x[:1].repeat(count, *[1] * (x.dim() - 1)))
    assert torch_ort.counters()["graphs_captured"] == 1


def test_rows_with_a_rest_stay_as_they_are() -> None:
    """Through one graph as well: only the captured size has whole patches."""
    torch.manual_seed(0)
    model = of_planes(nn.Conv2d(3, 32, 4, 4), 32)
    compiled = torch.compile(copy.deepcopy(model), backend="ort", dynamic=True)
    for width in (16, 18, 21, 4):
        assert_as_exact_as_eager(model, compiled, torch.randn(2, 3, 8, width))


@pytest.mark.parametrize("name", MODELS)
def test_no_convolution_of_few_channels_is_left(name: str, monkeypatch) -> None:
    model, x = make(name)
    joined = kinds_of(torch.compile(model, backend="ort"), x)
    monkeypatch.setenv("TORCH_ORT_DISABLE", "join_patches")
    without = kinds_of(torch.compile(model, backend="ort"), x)
    assert without.count("Conv") == joined.count("Conv") + 1
    assert joined.count("Convolution") == without.count("Convolution") + 1
    with_weight = int(name != "few_in_a_row")
    for kind, sign in (("aten::convolution_backward", -1), ("ConvolutionWeightGrad", 1)):
        assert joined.count(kind) == without.count(kind) + sign * with_weight


@pytest.mark.parametrize("part", ["columns", "rows", "channels"])
def test_weights_that_are_views_of_others(part: str) -> None:
    torch.manual_seed(0)
    whole = {"columns": (32, 3, 4, 8), "rows": (32, 3, 8, 4), "channels": (32, 5, 4, 4)}[part]
    weight = torch.randn(whole).to(memory_format=torch.channels_last).requires_grad_()
    rest = of_planes(nn.Identity(), 32)
    x = torch.randn(4, 3, 16, 24).to(memory_format=torch.channels_last)

    def run(weight: Tensor, x: Tensor, rest: nn.Module) -> Tensor:
        cut = {"columns": weight[..., :4], "rows": weight[:, :, ::2], "channels": weight[:, :3]}
        return rest(functional.conv2d(x, cut[part], stride=4))

    exact = weight.detach().double().requires_grad_()
    got = torch.compile(run, backend="ort")(weight, x, rest)
    want = run(exact, x.double(), copy.deepcopy(rest).double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    got.square().mean().backward()
    want.square().mean().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_two_calls_alive_at_once_and_inference() -> None:
    model, x = make("squares")
    compiled, exact = torch.compile(model, backend="ort"), copy.deepcopy(model).double()
    batches = [x, x.flip(0)]
    for call, dtype in ((compiled, torch.float32), (exact, torch.float64)):
        results = [call(each.to(dtype)).square().mean() for each in batches]
        for result in reversed(results):
            result.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x).double(), exact(x.double()), rtol=1e-5, atol=1e-5)
