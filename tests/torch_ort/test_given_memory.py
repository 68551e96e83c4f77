"""Kernels that would not write where the engine wants: their numbers are right all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ort
from torch_ort.ortmodule import ORTModuleONNXModelException

pytestmark = pytest.mark.ort_only

ROADS = {
    "compile": lambda module: torch.compile(module, backend="ort", fullgraph=True),
    "ortmodule": torch_ort.ORTModule,
}
LOSSES: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "binary_cross_entropy": lambda x, y, r: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), reduction=r
    ),
    "weighted_binary_cross_entropy": lambda x, y, r: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), weight=y.exp(), reduction=r
    ),
    "mse_loss": lambda x, y, r: F.mse_loss(x, y, reduction=r),
    "huber_loss": lambda x, y, r: F.huber_loss(x, y, reduction=r, delta=0.5),
    "smooth_l1_loss": lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r),
    "soft_margin_loss": lambda x, y, r: F.soft_margin_loss(x, y.sign(), reduction=r),
    "multi_margin_loss": lambda x, y, r: F.multi_margin_loss(x, (y[:, 0] > 0).long(), reduction=r),
    "multilabel_margin_loss": lambda x, y, r: F.multilabel_margin_loss(
        x, y.argsort(1), reduction=r
    ),
}


class Loss(nn.Module):
    """A loss among other outputs, so that what it writes beside its own memory shows."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        scaled = x * self.scale
        loss = self.loss(scaled, y)
        return loss, loss * 2, scaled.mean(), y.amax()


def check_road(road: str, module: nn.Module, batches: list[tuple[Tensor, ...]]) -> None:
    """Compare values and gradients of each batch with eager's; no fallback, no warning."""
    compiled = ROADS[road](module)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was resized")
        warnings.simplefilter("error", torch_ort.fallback.FallbackWarning)
        for batch in batches:
            got, want = (run(call, module, batch) for call in (compiled, module))
            torch.testing.assert_close(got, want)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["forward_runs"] >= len(batches)


def run(call: Callable, module: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    module.zero_grad()
    first, *others = (tensor.detach() for tensor in batch)
    first.requires_grad_()
    results = call(first, *others)
    weights = torch.arange(1, len(results) + 1)
    sum((r * w).sum() for r, w in zip(results, weights, strict=True)).backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    return [*(result.detach() for result in results), first.grad, *gradients]


@pytest.mark.parametrize("layout", ["dense", "transposed"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("road", ROADS)
def test_losses(road: str, name: str, reduction: str, layout: str) -> None:
    def values() -> Tensor:
        return torch.randn(6, 4) if layout == "dense" else torch.randn(4, 6).t()

    module = Loss(lambda x, y: LOSSES[name](x, y, reduction))
    check_road(road, module, [(values(), values()) for _ in range(3)])


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_of_transposed_images(road: str, affine: bool) -> None:
    weights = (torch.rand(5), torch.rand(5)) if affine else (None, None)

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> tuple[Tensor]:
            strided = (x * self.scale).transpose(1, 2)
            return (F.batch_norm(strided, None, None, *weights, training=True),)

    check_road(road, Norm(), [(torch.randn(3, 4, 5),) for _ in range(3)])


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("layout", ["sliced", "broadcast", "transposed"])
def test_batch_norm_of_strided_inputs(road: str, layout: str) -> None:
    make = {
        "sliced": lambda: torch.randn(3, 5, 8)[..., ::2],
        "broadcast": lambda: torch.randn(3, 5, 1).expand(3, 5, 4),
        "transposed": lambda: torch.randn(3, 4, 5).transpose(1, 2),
    }[layout]

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first = F.batch_norm(x, None, None, training=True)
            return first, F.batch_norm(x.detach(), None, None, training=True)

    check_road(road, Norm(), [(make(),) for _ in range(3)])


class SmallUNet(nn.Module):
    """Two scales of an image with a way past the smaller one, and a loss at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        wide = self.down(x).relu()
        narrow = self.inner(F.max_pool2d(wide, 2)).relu()
        made = self.last(torch.cat([wide, self.up(narrow)], 1))
        return F.mse_loss(made, y), made


@pytest.mark.parametrize("road", ROADS)
def test_a_network_that_ends_in_a_loss(road: str) -> None:
    check_road(
        road, SmallUNet(), [(torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)) for _ in range(4)]
    )


@pytest.mark.parametrize("road", ROADS)
def test_forwards_whose_results_are_dropped(road: str) -> None:
    module = SmallUNet()
    compiled = ROADS[road](module)
    for _ in range(6):
        x, y = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
        torch.testing.assert_close(compiled(x, y), module(x, y))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.fixture
def erfc_elsewhere() -> Iterator[None]:
    """Let a kernel that the engine trusts point its result at memory of its own."""
    library = torch.library.Library("aten", "IMPL")

    def elsewhere(x: Tensor, *, out: Tensor) -> Tensor:
        return out.set_(x.exp())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("erfc.out", elsewhere, "CPU", allow_override=True)
    yield
    library._destroy()


class Erfc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.erfc(x * self.scale) + 1


@pytest.mark.usefixtures("erfc_elsewhere")
@pytest.mark.parametrize("road", ROADS)
def test_a_kernel_that_leaves_its_memory_is_named(road: str) -> None:
    compiled = ROADS[road](Erfc())
    error = torch_ort.InternalError if road == "compile" else ORTModuleONNXModelException
    with pytest.raises(error, match=r"aten::erfc.out.*test_given_memory.*other memory"):
        compiled(torch.randn(3, 4))


@pytest.mark.usefixtures("erfc_elsewhere")
@pytest.mark.parametrize("road", ROADS)
def test_a_kernel_that_leaves_its_memory_is_run_by_pytorch(
    road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = Erfc()
    compiled, x = ROADS[road](module), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="aten::erfc.out"):
        got = compiled(x)
    torch.testing.assert_close(got, module(x))
    assert torch_ort.counters()["fallbacks"] == 1
