"""Functions whose backward writes into a buffer, on both roads."""

from __future__ import annotations

import copy

import pytest
import torch
from models import module_with
from torch import nn

import torch_ort
from tests.roads import ROADS

pytestmark = [pytest.mark.ort_only, pytest.mark.hands_over("a Function under torch.compile")]

WRITES = {
    "counts": lambda buffer, gradient: buffer.add_(1),
    "sets": lambda buffer, gradient: buffer.fill_(3),
    "clears": lambda buffer, gradient: buffer.zero_(),
    "draws": lambda buffer, gradient: buffer.uniform_(),
    "adds": lambda buffer, gradient: buffer.add_(gradient.sum(0)),
    "copies": lambda buffer, gradient: buffer.copy_(gradient.sum(0)),
    "averages": lambda buffer, gradient: buffer.mul_(0.9).add_(gradient.abs().mean(0), alpha=0.1),
    "sets one": lambda buffer, gradient: buffer[:1].copy_(gradient.max()),
    "counts and adds": lambda buffer, gradient: buffer.add_(1).add_(gradient.sum(0)),
}


def network(write) -> nn.Module:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, buffer):
            ctx.buffer = buffer
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            write(ctx.buffer, gradient)
            return gradient * 2, None

    return module_with(
        lambda self, x: Doubled.apply(self.linear(x), self.seen).relu(),
        linear=nn.Linear(4, 4),
        seen=torch.full((4,), 0.5),
    )


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("road", ROADS)
def test_a_buffer_that_backward_writes_into(road, write):
    model = network(WRITES[write])
    other = copy.deepcopy(model)
    for module, call in ((model, model), (other, ROADS[road](other))):
        torch.manual_seed(1)
        for _ in range(3):
            before = module.seen.clone()
            loss = call(torch.randn(3, 4)).square().sum()
            assert torch.equal(module.seen, before)  # forward writes nothing
            loss.backward()
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    torch.testing.assert_close(other.linear.weight.grad, model.linear.weight.grad)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["backward_runs"] == 3
