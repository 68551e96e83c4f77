"""The option `conv_algo_search`: how cuDNN chooses algorithms while a graph runs."""

from __future__ import annotations

from collections.abc import Iterator

import injection
import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import _C, DebugOptions, ORTModule

pytestmark = pytest.mark.cuda


@pytest.fixture(params=[False, True], ids=["heuristic", "set by the user"])
def before(request, monkeypatch) -> bool:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", request.param)
    return request.param


@pytest.fixture
def seen() -> Iterator[list[bool]]:
    """Give the setting of cuDNN at each kernel that the engine runs."""
    found: list[bool] = []

    def note(place: str) -> None:
        if place in ("out", "functional", "region"):
            found.append(torch.backends.cudnn.benchmark)

    _C.set_failpoint(note)
    yield found
    _C.set_failpoint(None)


def train(call) -> None:
    call(torch.ones(2, 3, 8, 8, device="cuda")).sum().backward()


@pytest.mark.parametrize("road", ["module", "compile"])
@pytest.mark.parametrize("search", ["HEURISTIC", "EXHAUSTIVE", "exhaustive"])
def test_convolutions_are_timed_where_asked_for(search, road, before, seen):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).cuda()
    if road == "module":
        call = ORTModule(module, DebugOptions(config={"conv_algo_search": search}))
    else:
        call = torch.compile(module, backend="ort", options={"conv_algo_search": search})
    for _ in range(2):
        train(call)
    assert len(seen) >= 4
    assert set(seen) == {before or search != "HEURISTIC"}
    assert torch.backends.cudnn.benchmark == before
    assert torch_ort.counters()["fallbacks"] == 0


def test_the_environment_asks(monkeypatch, seen):
    monkeypatch.setenv("ORTMODULE_CONV_ALGO_SEARCH", "EXHAUSTIVE")
    train(torch.compile(nn.Conv2d(3, 4, 3).cuda(), backend="ort"))
    assert set(seen) == {True}
    assert not torch.backends.cudnn.benchmark


def test_the_setting_comes_back_after_a_step_that_fails():
    options = {"conv_algo_search": "EXHAUSTIVE", "strict": True}
    loss = torch.compile(nn.Conv2d(3, 4, 3).cuda(), backend="ort", options=options)(
        torch.ones(2, 3, 8, 8, device="cuda")
    ).sum()
    injection.at_place("gradients", lambda: RuntimeError("no gradients"))
    with pytest.raises(RuntimeError, match="no gradients"):
        loss.backward()
    assert not torch.backends.cudnn.benchmark
