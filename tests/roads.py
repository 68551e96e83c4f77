"""The two roads into the engine, for tests that take both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torch_ort

ROADS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "compile": lambda module: torch.compile(module, backend="ort"),
    "ortmodule": torch_ort.ORTModule,
}


class Applies(torch.nn.Module):
    """A module that applies a function to its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)
