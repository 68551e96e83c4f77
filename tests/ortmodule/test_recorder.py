"""What the recorder hands over to AOTAutograd, seen from an ORTModule."""

import copy
import logging
import re

import pytest
import torch
from models import module_with
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.rules import shape_rules


class Net(nn.Module):
    """A linear layer and what a test does with its result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x), x)


def train_both(function, steps: int = 3) -> ORTModule:
    """Train in eager and as an ORTModule; compare losses and weights."""
    torch.manual_seed(0)
    eager, ours = Net(function), Net(function)
    ours.load_state_dict(eager.state_dict())
    wrapped = ORTModule(ours)
    for model, call in ((eager, eager), (ours, wrapped)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            x = torch.randn(3 + step, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            results = call(x)
            results = results if isinstance(results, tuple) else (results,)
            sum(result.sum() for result in results if result.requires_grad).backward()
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["backward_runs"] == steps
    return wrapped


def test_a_plain_module_is_recorded_once():
    train_both(lambda y, x: y.relu())
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (1, 1)
    assert counters["recordings_handed_over"] == 0


@pytest.mark.hands_over("the test is about it")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda y, x: (lambda z: (y, z.detach(), z.detach()))(y.exp()),
            "outputs share memory, and it is not known whose",
        ),
        (
            lambda y, x: y + torch.arange(1) * torch.sym_float(x.shape[0]),
            "an argument that depends on sizes and is no integer",
        ),
    ],
)
def test_what_is_handed_over_trains_as_well(function, words, caplog):
    with caplog.at_level(logging.INFO, "torch_ort.recorder"):
        train_both(function)
    counters = torch_ort.counters()
    assert counters["graphs_recorded"] == 0
    assert counters["recordings_handed_over"] == 1
    assert any(re.search(words, record.getMessage()) for record in caplog.records)


@pytest.mark.hands_over("an input that autograd watches is written into")
@pytest.mark.parametrize(
    "write",
    [lambda x, w: x.mul_(w), lambda x, w: x.add_(w)[1:], lambda x, w: (x[0].copy_(w), x * w)[1]],
)
def test_what_is_written_into_an_argument_keeps_its_gradient(write):
    eager = module_with(
        lambda self, x: write(x, self.weight), weight=nn.Parameter(torch.arange(4.0))
    )
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5):
        arguments = [torch.ones(rows, 4) for _ in range(2)]
        for model, x in zip((eager, ours), arguments, strict=True):
            (model(x).sum() + x.sum()).backward()
        torch.testing.assert_close(*arguments)
        torch.testing.assert_close(ours.weight.grad, eager.weight.grad)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), (6,)),
        (lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3)), (2, 5, 4)),
        (lambda: nn.Sequential(nn.InstanceNorm2d(2, affine=True), nn.Conv2d(2, 3, 3)), (2, 5, 4)),
        (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (6,)),
    ],
    ids=["batch", "images", "instance", "layer"],
)
def test_a_norm_that_comes_first(make, sizes, rows):
    """Operators compare symbolic channels with those of the norm's own tensors."""
    torch.manual_seed(0)
    eager = make()
    wrapped = ORTModule(copy.deepcopy(eager))
    for module in (eager, wrapped):
        module.train(rows > 1 or len(sizes) > 1)
    for count in (rows, rows + 2):
        x = torch.randn(count, *sizes)
        torch.testing.assert_close(wrapped(x), eager(x))
        for module in (eager, wrapped):
            module.zero_grad()
            module(x).square().sum().backward()
        for got, want in zip(wrapped.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (1, 1)


class Cut(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.hands_over("no input gets the gradient")
def test_an_output_that_wants_a_gradient_which_no_input_gets():
    wrapped = ORTModule(Net(lambda y, x: Cut.apply(y)))
    result = wrapped(torch.ones(3, 4))
    assert result.requires_grad
    result.sum().backward()
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    assert torch_ort.counters()["fallbacks"] == 0


def test_the_recorder_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    train_both(lambda y, x: y.relu())
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (1, 0)
    assert counters["recordings_handed_over"] == 0


@pytest.mark.hands_over("a rule is made wrong")
def test_a_rule_that_is_wrong_is_found_by_the_first_run(monkeypatch):
    """The engine checks what kernels give: AOTAutograd captures what a rule has spoilt."""

    monkeypatch.setitem(
        shape_rules.RULES, torch.ops.aten.constant_pad_nd.default, lambda x, *rest: x
    )
    train_both(lambda y, x: nn.functional.pad(y, (1, 1)).exp())
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (2, 1)
    assert counters["recordings_handed_over"] == 1


def test_a_kernels_own_error_is_raised():
    wrapped = ORTModule(nn.Embedding(5, 3))
    with pytest.raises(IndexError, match="out of range"):
        wrapped(torch.tensor([1, 7]))
    assert wrapped(torch.tensor([1, 2])).shape == (2, 3)
