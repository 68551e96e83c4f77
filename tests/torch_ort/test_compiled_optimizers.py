"""Steps of PyTorch's optimizers that are compiled, with a learning rate that changes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import torch_ort

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
}


def train(
    make: Callable[..., torch.optim.Optimizer], compile_step: Callable[[Callable], Callable]
) -> tuple[dict, dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(model.parameters(), lr=0.01)
    schedule = LinearLR(optimizer, start_factor=0.1, total_iters=4)
    step = compile_step(optimizer.step)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        step()
        schedule.step()
    return model.state_dict(), optimizer.state_dict()["state"]


# They write into parameters, which AOTAutograd captures.
@pytest.mark.hands_over("inputs that the caller brings are written into")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.ort_only
@pytest.mark.compile_only("an ORTModule has no optimizer inside")
def test_steps_are_those_of_eager(name):
    wanted = train(KINDS[name], lambda step: step)
    got = train(KINDS[name], lambda step: torch.compile(step, backend="ort"))
    torch.testing.assert_close(got, wanted)
    counters = torch_ort.counters()
    assert counters["forward_runs"] == 5
    assert counters["fallbacks"] == counters["graph_breaks"] == 0
    assert counters["frames_left_to_eager"] == counters["calls_left_to_eager"] == 0
    assert counters["recorder_bugs"] == 0
