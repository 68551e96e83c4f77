"""Instance norms are parts of fused regions between convolutions, with eager's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import torch_ort
from tests.cpu.gradients import compare_gradients
from tests.cpu.regions import assert_near, crossed

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
SIZES = {1: (17,), 2: (9, 8), 3: (5, 6, 7)}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")


def model_of(dims: int, channels: int = 6, **settings: bool) -> nn.Sequential:
    """Give two norms between convolutions; biases in front of norms have no gradient."""
    torch.manual_seed(0)
    convolution, norm = CONVOLUTIONS[dims], NORMS[dims]
    model = nn.Sequential(
        convolution(3, channels, 3, padding=1, bias=False), norm(channels, **settings), nn.ReLU(),
        convolution(channels, channels, 3, padding=1, bias=False), norm(channels, **settings),
        nn.LeakyReLU(), convolution(channels, 2, 1),
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
        else:
            nn.init.normal_(parameter, 0, 0.2, generator=torch.manual_seed(len(name)))
    return model


def train(model: nn.Module, batches: list[Tensor], atol: float, **settings: bool) -> None:
    """Compare results and gradients of steps with those of a copy in float64."""
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort", **settings)
    for x in batches:
        weights = torch.randn_like(model(x).detach())
        given = []
        for call, dtype in ((compiled, x.dtype), (exact, torch.float64)):
            leaf = x.detach().to(dtype).requires_grad_()
            call.zero_grad()
            y = call(leaf)
            (y * weights.to(dtype)).sum().backward()
            given.append((y.detach(), leaf.grad))
        for got, want in zip(*given, strict=True):
            assert got.stride() == want.stride()
            assert_near(got, want, atol=atol * max(1.0, float(want.abs().max())))
        size = max(float(p.grad.abs().max()) for p in exact.parameters() if p.requires_grad)
        compare_gradients(model, exact, atol=atol * max(1.0, size))


@crossed(dims=SIZES, affine=(True, False), dtype=TOLERANCE)
def test_training(dims: int, affine: bool, dtype: torch.dtype) -> None:
    model = model_of(dims, affine=affine).to(dtype)
    train(model, [torch.randn(4, 3, *SIZES[dims], dtype=dtype) + 3 for _ in range(2)],
        TOLERANCE[dtype])  # fmt: skip


@pytest.mark.parametrize("dims", SIZES)
def test_many_sizes_through_one_graph(dims: int) -> None:
    sizes = [(4, 3, *SIZES[dims]), (2, 3, *[size + 3 for size in SIZES[dims]]), (3, 3, 8, 8, 8)]
    batches = [torch.randn(size[: 2 + dims]) for size in sizes]
    train(model_of(dims, affine=True), batches, 1e-5, dynamic=True)


@pytest.mark.parametrize("affine", [True, False])
def test_one_image(affine: bool) -> None:
    """Merging one image with others changes nothing, so that no view is left of it."""
    train(model_of(2, affine=affine), [torch.randn(1, 3, 9, 8)], 1e-5)


def test_batch_norms_of_one_image_without_running_statistics() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, track_running_stats=False), nn.Tanh()
    )
    train(model, [torch.randn(1, 3, 7, 9), torch.randn(1, 3, 7, 9)], 1e-5)
    train(model, [torch.randn(3, 3, 7, 9)], 1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_channels_lie_side_by_side_between_convolutions(offset: float) -> None:
    model, x = model_of(2, channels=40, affine=True), torch.randn(4, 3, 16, 16)
    model[0].bias = nn.Parameter(torch.full((40,), offset), requires_grad=False)
    graph = torch_ort.explain(copy.deepcopy(model), x).graphs[0]
    assert graph.nodes["torch_ort.WinogradConvolution"] == 2  # with the gradient of an image
    assert graph.nodes["torch_ort.WinogradWeightGrad"] == 1
    assert not [name for name in graph.aten if "norm" in name]
    train(model, [x, torch.randn(4, 3, 16, 16)], 1e-5 if offset == 0 else 1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_alone(mode) -> None:
    model = model_of(2, affine=True).eval()
    x = torch.randn(2, 3, 9, 8)
    compiled = torch.compile(model, backend="ort")
    with mode():
        assert_near(compiled(x), copy.deepcopy(model).double()(x.double()), atol=1e-5)


def test_images_that_the_caller_gives_channels_last() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.Conv2d(6, 4, 3))
    x = torch.randn(2, 6, 9, 8).contiguous(memory_format=torch.channels_last)
    train(model, [x], 1e-5)


def test_running_statistics() -> None:
    model = model_of(2, affine=True, track_running_stats=True)
    other = copy.deepcopy(model)
    x = torch.randn(3, 3, 9, 8)
    assert_near(torch.compile(model, backend="ort")(x).detach(), other(x).detach(), atol=1e-5)
    for got, want in zip(model.buffers(), other.buffers(), strict=True):
        assert_near(got, want, atol=1e-6)


def test_short_floats() -> None:
    model = model_of(2, affine=True).bfloat16()
    x = torch.randn(2, 3, 9, 8).bfloat16()
    want = copy.deepcopy(model).double()(x.double())
    assert_near(torch.compile(model, backend="ort")(x).detach(), want.detach(), atol=0.1)


def test_parameters_that_are_shared_and_read_otherwise() -> None:
    """The weight of a norm scales what comes after it, too."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm2d(4, affine=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.norm(x).sigmoid())
            return y * self.norm.weight[:, None, None] + self.norm.bias.sum()

    train(Shared(), [torch.randn(3, 4, 6, 5)], 1e-5)


@pytest.mark.hands_over("a checkpoint is an operator that takes graphs")
def test_checkpoints() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(2, affine=True)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    train(Checkpointed(), [torch.randn(3, 3, 9, 8)], 1e-5)
