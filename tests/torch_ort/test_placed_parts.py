"""Models whose concatenations find their parts in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_ort

pytestmark = pytest.mark.ort_only


class Skip(nn.Module):
    """Skip connections along channels, as U-Net has them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.inner = nn.Conv2d(6, 4, 3, stride=2, padding=1)
        self.up = nn.Conv2d(10, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.down(x)).sigmoid()
        wide = nn.functional.interpolate(self.inner(skip), scale_factor=2).tanh().exp()
        return self.up(torch.cat([skip, wide], 1)).square().mean()


class Packed(nn.Module):
    """One product for queries, keys and values: their gradients are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed = self.project(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*packed.unbind(0), is_causal=True)
        return mixed.square().mean()


class Token(nn.Module):
    """A learnt token before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.place = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        rest = (x * self.place).tanh()
        return torch.cat([self.first.expand(len(x), -1, -1), rest], 1).softmax(1).square().sum()


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "skip": lambda: (Skip(), (2, 3, 8, 8)),
    "packed": lambda: (Packed(), (3, 5, 8)),
    "token": lambda: (Token(), (3, 5, 8)),
}


def gradients(call: Callable, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = call(x)
    loss.backward()
    return [loss.detach(), x.grad, *(param.grad.clone() for param in model.parameters())]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model, size = MODELS[name]()
    compiled = torch.compile(model, backend="ort", dynamic=dynamic, options={"check": 2})
    torch_ort.reset_counters()
    for batch in (size[0], size[0] + 1, size[0]):
        x = torch.randn(batch, *size[1:])
        torch.testing.assert_close(gradients(compiled, model, x), gradients(model, model, x))
    assert not any(count for key, count in torch_ort.counters().items() if "fallback" in key)


def test_gradients_of_packed_projections_are_not_copied() -> None:
    model, x = Packed(), torch.randn(3, 5, 8, requires_grad=True)
    steps = {}
    for disable in ((), ("place_parts",)):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="ort", options={"disable": disable})
        for _ in range(3):
            torch_ort.reset_counters()
            compiled(x).backward()
        steps[disable] = torch_ort.counters()["steps_out"]
    assert steps[()] == steps["place_parts",] - 1
