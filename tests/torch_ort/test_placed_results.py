"""Results of kernels without an `out=` form in planned memory.

Convolutions, norms of groups, images of other sizes, gradients of slices.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_ort
from tests.comparison import counters_of_a_steady_step

pytestmark = pytest.mark.ort_only

MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "3x3": lambda: (nn.Conv2d(8, 16, 3, padding=1), (4, 8, 9, 9)),
    "without_bias": lambda: (nn.Conv2d(8, 16, 3, bias=False), (4, 8, 9, 9)),
    "stride": lambda: (nn.Conv2d(3, 16, 7, stride=2, padding=3), (2, 3, 32, 32)),
    "1x1": lambda: (nn.Conv2d(16, 32, 1), (2, 16, 5, 5)),
    "depthwise": lambda: (nn.Conv2d(16, 16, 3, groups=16), (2, 16, 8, 8)),
    "groups": lambda: (nn.Conv2d(8, 12, 3, groups=4), (2, 8, 8, 8)),
    "dilated": lambda: (nn.Conv2d(4, 4, 3, dilation=2), (2, 4, 12, 12)),
    "one_channel": lambda: (nn.Conv2d(1, 1, 3), (3, 1, 6, 6)),
    "one_pixel": lambda: (nn.Conv2d(4, 8, 3), (3, 4, 3, 3)),
    "transposed": lambda: (nn.ConvTranspose2d(6, 4, 3, stride=2), (2, 6, 5, 5)),
    "1d": lambda: (nn.Conv1d(6, 8, 5), (3, 6, 40)),
    "3d": lambda: (nn.Conv3d(2, 4, 3), (2, 2, 6, 6, 6)),
    "no_images": lambda: (nn.Conv2d(3, 4, 3), (0, 3, 8, 8)),
}


NORMS_AND_RESIZED: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "group_norm": lambda: (nn.GroupNorm(2, 8), (4, 8, 9, 9)),
    "group_norm_one_group": lambda: (nn.GroupNorm(1, 6), (1, 6, 5, 7)),
    "group_norm_plain": lambda: (nn.GroupNorm(3, 6, affine=False), (2, 6, 5, 7)),
    "group_norm_1d": lambda: (nn.GroupNorm(2, 6), (3, 6, 40)),
    "bilinear": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), (2, 6, 5, 7)),
    "bilinear_corners": lambda: (
        nn.Upsample((9, 4), mode="bilinear", align_corners=True),
        (2, 6, 5, 7),
    ),
    "bilinear_one_channel": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 1, 5, 7)),
    "nearest": lambda: (nn.Upsample(scale_factor=3), (2, 6, 5, 7)),
    "nearest_exact": lambda: (nn.Upsample(scale_factor=1.5, mode="nearest-exact"), (2, 6, 5, 7)),
}


class Around(nn.Module):
    """A convolution with something on both sides, so that its input asks for a gradient."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x * self.scale)).square().sum()


class AroundNorm(Around):
    """A norm takes out of its input what one scale puts in."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.sin(x * self.scale))).square().sum()


def step(call: Callable, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = call(x)
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


def copied() -> int:
    return torch_ort.counters()["results_copied"]


@pytest.fixture(autouse=True)
def clean() -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    torch.manual_seed(0)


def batches(size: tuple, dtype: torch.dtype, layout: torch.memory_format) -> list[Tensor]:
    if layout == torch.channels_last and len(size) != 4:
        pytest.skip("images only")
    return [torch.randn(size).to(dtype).to(memory_format=layout) for _ in range(4)]


def copied_in_later_steps(compiled: Callable, model: nn.Module, inputs: list[Tensor]) -> int:
    """Train steps as in eager; the first call tells where a kernel makes its results."""
    counts = []
    for x in inputs:
        got, want = step(compiled, model, x), step(model, model, x)
        # Sums of bfloat16 that cancel are off by more than numbers of their size, in eager as well.
        within = {"rtol": 0.05, "atol": 0.05} if x.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(got, want, **within)
        counts.append(copied())
    assert torch_ort.counters()["steps_functional"] == 0
    return counts[-1] - counts[1]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_convolutions(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    inner, size = MODULES[name]()
    inputs = batches(size, dtype, layout)
    model = Around(inner).to(dtype).to(memory_format=layout)
    compiled = torch.compile(model, backend="ort")
    count = copied_in_later_steps(compiled, model, inputs)
    # Without images the gradients of weights come in another layout than with them.
    assert count == 0 or size[0] == 0


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS_AND_RESIZED)
def test_norms_and_resized_images(
    name: str, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    inner, size = NORMS_AND_RESIZED[name]()
    inputs = batches(size, dtype, layout)
    model = AroundNorm(inner).to(dtype)
    compiled = torch.compile(model, backend="ort", options={"emulate_eager_casts": True})
    assert copied_in_later_steps(compiled, model, inputs) == 0


def test_results_that_leave_keep_their_memory() -> None:
    conv = nn.Conv2d(3, 8, 3)
    compiled = torch.compile(conv, backend="ort")
    inputs = [torch.randn(2, 3, 10, 10) for _ in range(5)]
    with torch.no_grad():
        results = [compiled(x) for x in inputs]
        del compiled
        torch.compiler.reset()
        gc.collect()
        torch_ort.empty_cache()
        for x, result in zip(inputs, results, strict=True):
            torch.testing.assert_close(result, conv(x))


def test_two_sizes_in_turn() -> None:
    model = Around(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    compiled = torch.compile(model, backend="ort", dynamic=True)
    for number in range(8):
        if number == 4:
            before = copied()
        x = torch.randn(2 + number % 2, 3, 8 + number % 2, 8)
        torch.testing.assert_close(step(compiled, model, x), step(model, model, x))
    assert copied() == before


def test_kernels_that_change_between_calls() -> None:
    model = Around(nn.Conv2d(8, 8, 3))
    compiled = torch.compile(model, backend="ort")
    x = torch.randn(2, 8, 9, 9)
    for number in range(8):
        # oneDNN allocates otherwise than PyTorch's own convolution.
        with torch.backends.mkldnn.flags(enabled=number // 2 % 2 == 0):
            torch.testing.assert_close(step(compiled, model, x), step(model, model, x))


def test_two_calls_alive_and_a_graph_that_is_kept() -> None:
    model = Around(nn.Conv2d(3, 4, 3))
    compiled = torch.compile(model, backend="ort")
    first, second = torch.randn(2, 3, 7, 7), torch.randn(2, 3, 7, 7)
    for _ in range(3):
        losses = compiled(first), compiled(second)
        wanted = model(first), model(second)
        for loss, want in zip(reversed(losses), reversed(wanted), strict=True):
            for _ in range(2):
                got = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                ref = torch.autograd.grad(want, list(model.parameters()), retain_graph=True)
                torch.testing.assert_close(got, ref)


def test_threads() -> None:
    model = Around(nn.Conv2d(3, 4, 3))
    compiled = torch.compile(model, backend="ort")
    compiled(torch.randn(2, 3, 9, 9)).backward()
    failures: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(seed))
            want = torch.autograd.grad(model(x), list(model.parameters()))
            for _ in range(20):
                got = torch.autograd.grad(compiled(x), list(model.parameters()))
                torch.testing.assert_close(got, want)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_gradients_of_slices() -> None:
    table = nn.Parameter(torch.randn(12, 5))

    def call(x: Tensor) -> Tensor:
        return (table[3:9:2] * x).sum() + table[4].exp().sum()

    compiled = torch.compile(call, backend="ort")
    for number in range(4):
        if number == 2:
            before = copied()
        x = torch.randn(3, 5)
        got = torch.autograd.grad(compiled(x), table)
        torch.testing.assert_close(got, torch.autograd.grad(call(x), table))
    assert copied() == before


def test_an_image_model_plans_all_its_memory() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
        nn.Linear(8 * 8 * 8, 10),
    )  # fmt: skip
    x, y = torch.randn(4, 3, 12, 12), torch.randint(10, (4,))
    report = torch_ort.explain(model, x)
    assert not report.graphs[0].functional
    assert report.graphs[0].steps["placed"] == 4
    compiled = torch.compile(model, backend="ort")
    counters = counters_of_a_steady_step(model, compiled, x, y)
    assert counters["results_copied"] == counters["arena_allocations"] == 0
