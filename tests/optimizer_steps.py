"""Parameters and gradients for tests of optimizers, and how far two of them have come apart."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

# Around the length of a tile; no element, and no dim.
SIZES = [(), (0,), (1,), (3,), (2047,), (2048,), (2049,), (33, 300), (2, 3, 4, 5)]


class Reference(Protocol):
    """An optimizer's formulas, step by step."""

    def step(self, grads: list[Tensor]) -> None:
        """Take a step with these gradients."""


def make_parameters(
    dtype: torch.dtype = torch.float32, sizes: list[tuple[int, ...]] = SIZES, seed: int = 0
) -> list[nn.Parameter]:
    """Make parameters whose numbers depend on nothing but sizes and the seed."""
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(size, dtype=torch.float64).to(dtype)) for size in sizes]


def like(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    """Copy parameters, in another dtype if one is given."""
    return [nn.Parameter(param.detach().clone().to(dtype or param.dtype)) for param in params]


def gradients(
    params: list[nn.Parameter], seed: int, rounded_to: torch.dtype | None = None
) -> list[Tensor]:
    """Make gradients in the dtypes of the parameters, which another dtype may hold as well."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(param.shape, dtype=torch.float64, generator=generator)
        .to(rounded_to or param.dtype)
        .to(param.dtype)
        for param in params
    ]


def give(params: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    """Set gradients, in the layouts of the parameters, as autograd accumulates."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else torch.empty_like(param).copy_(grad)


def train(
    optimizer: torch.optim.Optimizer,
    count: int = 5,
    first: int = 0,
    rounded_to: torch.dtype | None = None,
    **arguments: object,
) -> None:
    """Take steps with gradients that depend on nothing but their number."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for seed in range(first, first + count):
        give(params, gradients(params, seed, rounded_to))
        optimizer.step(**arguments)


def train_reference(reference: Reference, params: list[nn.Parameter], count: int = 5) -> None:
    """Give a reference the gradients that `train` gives to these parameters."""
    for seed in range(count):
        reference.step(gradients(params, seed))


def errors(got: list[Tensor], want: list[Tensor]) -> Tensor:
    """Give the errors of all elements, relative to 1 + their size."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(got, want, strict=True)]
    return torch.cat([((a - b).abs() / (1 + b.abs())).flatten() for a, b in pairs])


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """Give the largest of `errors`."""
    return errors(got, want).max().item()
