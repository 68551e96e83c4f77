"""Forwards that seed PyTorch's generator, or put its state back, run in eager PyTorch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleONNXModelException
from torch_ort.pytorch.generators import DrawsNoted, watched_seeding


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.rand(x.shape)


def seeded_at_the_end(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.manual_seed(4)
    return y


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand(x.shape)
    return x + noise


def forked_alone(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        y = F.dropout(x)
    return y + torch.rand(x.shape)


def set_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    y = F.dropout(x)
    torch.set_rng_state(state)
    return y + F.dropout(x)


SEEDING = (seeded, seeded_at_the_end, forked, forked_alone, set_back)


def drawing(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3) + torch.rand(x.shape) + torch.randn_like(x)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: F.dropout(y, 0.3).exp(), x, use_reentrant=False) + F.dropout(x)


def runs(call: nn.Module) -> list[torch.Tensor]:
    """Give results of some calls, and what is drawn between them."""
    torch.manual_seed(0)
    return [value for i in range(3) for value in (call(torch.ones(3, 4)), torch.rand(2))]


def assert_same_runs(function: Callable[[torch.Tensor], torch.Tensor]) -> ORTModule:
    eager = Net(function)
    ours = ORTModule(copy.deepcopy(eager))
    for got, want in zip(runs(ours), runs(eager), strict=True):
        torch.testing.assert_close(got, want)
    return ours


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("function", SEEDING)
def test_seeding_runs_in_pytorch(function, is_recorded, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", "" if is_recorded else "recorder")
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with pytest.warns(FallbackWarning, match="forward seeds PyTorch's random generator"):
        assert_same_runs(function)
    assert torch_ort.counters()["fallbacks"] == 1


@pytest.mark.parametrize("draws", [False, True])
def test_switching_gradients_off_draws_nothing(draws):
    """Dynamo does so before it puts a state back, around what it traces for torch.cond."""
    with watched_seeding() as seeding, DrawsNoted():
        state = torch.get_rng_state()
        with torch.no_grad():
            if draws:
                torch.rand(2)
        torch.set_rng_state(state)
    assert seeding.is_found == draws


def test_states_may_be_put_back_one_after_another():
    """Dynamo does so with those of the CPU and of a GPU."""
    with watched_seeding() as seeding, DrawsNoted():
        state = torch.get_rng_state()
        for _ in range(2):
            torch.set_rng_state(state)
    assert not seeding.is_found


def test_seeding_raises_in_strict_mode():
    with pytest.raises(ORTModuleONNXModelException, match=r"puts its state back .*fork_rng"):
        ORTModule(Net(forked))(torch.ones(3, 4))


@pytest.mark.parametrize("function", [drawing, checkpointed])
def test_drawing_runs_in_the_engine(function):
    assert_same_runs(function)
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["forward_runs"]) == (0, 3)


@pytest.mark.hands_over("nothing captures draws from it")
def test_a_generator_of_its_own_is_left_to_eager(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def draws(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(2))

    with pytest.warns(FallbackWarning):
        assert_same_runs(draws)


def test_another_thread_draws_undisturbed_by_a_capture():
    """What a capture looks at is the generator of all threads."""
    inside, drawn = threading.Event(), threading.Event()

    def waits(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x)
        inside.set()
        assert drawn.wait(60)
        return y + torch.rand(x.shape)

    numbers = []
    ours = ORTModule(Net(waits))

    def draw() -> None:
        assert inside.wait(60)
        numbers.append(torch.rand(3))
        torch.manual_seed(7)
        numbers.append(torch.rand(3))
        drawn.set()

    torch.manual_seed(5)
    want = [torch.rand(3), torch.manual_seed(7) and torch.rand(3)]
    torch.manual_seed(5)
    other = threading.Thread(target=draw)
    other.start()
    ours(torch.ones(3, 4))
    other.join()
    assert torch_ort.counters()["fallbacks"] == 0
    for got, expected in zip(numbers, want, strict=True):
        assert torch.equal(got, expected)
