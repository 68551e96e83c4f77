# Modules with torch.autograd.Functions run in an ORTModule, and must be one graph there.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_functions import Net

import torch_ort


@pytest.fixture
def backend() -> str:
    return "ortmodule"


@pytest.fixture(params=["recorder", "AOTAutograd"], autouse=True)
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with graphs of the recorder and with those of AOTAutograd."""
    if request.param == "AOTAutograd":
        monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    return request.param


@pytest.fixture
def assert_python_steps(maker: str) -> Callable[..., None]:
    """Return a check that one graph ran, made as it should, with Functions as steps of it."""

    def check(steps: int | None = None, graphs: int = 1) -> None:
        counters = torch_ort.counters()
        assert counters["fallbacks"] == 0, counters
        assert counters["graphs_captured"] == graphs, counters
        recorded = graphs if maker == "recorder" else 0
        assert counters["graphs_recorded"] == recorded, counters
        if steps is None:
            assert counters["steps_python"] > 0, counters
        else:
            assert counters["steps_python"] == steps, counters

    return check


@pytest.fixture
def compare(compare_training: Callable, assert_python_steps: Callable) -> Callable[..., Any]:
    """Return `compare(function, make_inputs)`: train a small net around it, here and in eager."""

    def run(
        function: Callable[..., Any],
        make_inputs: Callable[[int], Any] | None = None,
        graphs: int = 1,
        **settings: Any,
    ) -> Any:
        runs = compare_training(
            lambda: Net(function), make_inputs or (lambda step: torch.randn(4, 6)), **settings
        )
        assert_python_steps(graphs=graphs)
        return runs

    return run
