# A subscriber that keeps what it sees, and the ways to run a model.
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import torch_ort
from torch_ort.convergence import GlobalSubscriberManager, SubscriberBase


@dataclass
class Row:
    """One tensor that a subscriber was shown."""

    direction: str
    name: str
    step: int
    depth: int
    tensor: torch.Tensor

    @property
    def key(self) -> tuple:
        return (self.direction, self.name, self.step, self.depth, self.tensor.dtype)


class Recorder(SubscriberBase):
    """Keeps all tensors."""

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        super().__init__(start_step, end_step)
        self.rows: list[Row] = []

    def forward_activation(self, name: str, tensor: torch.Tensor, step: int, depth: int) -> None:
        assert type(tensor) is torch.Tensor, "traced, not run"
        self.rows.append(Row("forward", name, step, depth, tensor.clone()))

    def backward_gradient(self, name: str, gradient: torch.Tensor, step: int, depth: int) -> None:
        assert type(gradient) is torch.Tensor, "traced, not run"
        self.rows.append(Row("backward", name, step, depth, gradient.clone()))

    def keys(self, direction: str | None = None, step: int | None = None) -> list[tuple]:
        return [
            row.key
            for row in self.rows
            if direction in (None, row.direction) and step in (None, row.step)
        ]

    def names(self, direction: str, step: int = 0) -> list[str]:
        return [r.name for r in self.rows if r.direction == direction and r.step == step]


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "ortmodule": torch_ort.ORTModule,
    "compile": lambda model: torch.compile(model, backend="ort", fullgraph=True),
}


@pytest.fixture(autouse=True)
def nothing_subscribed() -> Iterator[None]:
    yield
    GlobalSubscriberManager.unsubscribe()


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def ways() -> dict[str, Callable[[Any], Any]]:
    return WAYS


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]


@pytest.fixture(params=["ortmodule", "compile"])
def graph_way(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]
