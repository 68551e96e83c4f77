"""torch.distributions in an ORTModule: losses and samples, without looks at the values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributions, nn

import torch_ort
from torch_ort import ORTModule

pytestmark = pytest.mark.ort_only


class Policy(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.zeros(4))
        self.function = function

    def forward(self, x, actions):
        return self.function(self.linear(x), self.scale.exp(), actions)


def normal(y, scale, actions):
    of = distributions.Normal(y, scale)
    return -of.log_prob(actions).mean() + of.entropy().mean()


def categorical(y, scale, actions):
    of = distributions.Categorical(logits=y)
    return -of.log_prob(actions[:, 0].abs().long() % 4).mean() + of.entropy().mean()


def divergence(y, scale, actions):
    of = distributions.Normal(y, scale), distributions.Normal(torch.zeros_like(y), 1.0)
    return distributions.kl_divergence(*of).sum(-1).mean()


def independent(y, scale, actions):
    of = distributions.Independent(distributions.Normal(y, scale), 1)
    return -of.log_prob(actions).mean()


def bernoulli(y, scale, actions):
    of = distributions.Bernoulli(logits=y)
    return -of.log_prob((actions > 0).float()).mean()


def reparametrized(y, scale, actions):
    return distributions.Normal(y, scale).rsample().square().mean()


@pytest.mark.parametrize(
    "function", [normal, categorical, divergence, independent, bernoulli, reparametrized]
)
def test_training(function, monkeypatch):
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    eager = Policy(function)
    model = copy.deepcopy(eager)
    ours = ORTModule(model)
    for step in range(3):
        torch.manual_seed(step)
        x, actions = torch.randn(5, 6), torch.randn(5, 4)
        losses = []
        for call in (ours, eager):
            torch.manual_seed(10 + step)
            losses.append(call(x, actions))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in eager.parameters()]
        )
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["backward_runs"] == 3


def test_outside_of_captures_values_are_looked_at(monkeypatch):
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    ORTModule(Policy(normal))(torch.randn(5, 6), torch.randn(5, 4))
    with pytest.raises(ValueError, match="invalid values"):
        distributions.Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))
