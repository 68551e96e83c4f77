"""Modules whose first call sets up what later ones rely on, or whose calls take turns."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only


class SetUp(nn.Module):
    """A layer, and a function that may set `flag` and `count`."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.function = function
        self.flag, self.count, self.name = False, 0, "a"

    def forward(self, x):
        return self.function(self, self.linear(x))


def compare(function, calls: int = 5, before=lambda module: None) -> None:
    torch.manual_seed(0)
    module = SetUp(function)
    eager = copy.deepcopy(module)
    ours = torch_ort.ORTModule(module)
    for _ in range(calls):
        x = torch.randn(3, 4)
        before(module), before(eager)
        got, want = ours(x), eager(x)
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
        for name, parameter in module.named_parameters():
            other = eager.get_parameter(name)
            torch.testing.assert_close(parameter, other)
            torch.testing.assert_close(parameter.grad, other.grad)
        for name in ("flag", "count", "name"):
            assert getattr(module, name) == getattr(eager, name)


def scale_of_the_first_rows(module, y):
    """As an activation normalization does, which takes its scale from the first batch."""
    if not module.flag:
        with torch.no_grad():
            module.scale.copy_(y.std(0))
        module.flag = True
    return y * module.scale


def another_factor_first(module, y):
    if not module.flag:
        module.flag = True
        return y * 3
    return y * 2


def another_constant_first(module, y):
    y = y * torch.tensor([1.0, float(not module.flag), 3.0, 4.0])
    module.flag = True
    return y


@pytest.mark.hands_over("a parameter is written into, or nothing of the first call is captured")
@pytest.mark.parametrize(
    "function", [scale_of_the_first_rows, another_factor_first, another_constant_first]
)
def test_what_the_first_call_sets_up_is_set_up(function):
    compare(function)
    counters = torch_ort.counters()
    assert counters["calls_left_to_eager"] == 1
    assert counters["forward_runs"] == 4
    assert counters["fallbacks"] == 0


def test_a_constant_that_changes_nothing_costs_no_call():
    def noted(module, y):
        if module.name == "a":
            module.name = "b"
        return y * 2

    compare(noted)
    assert torch_ort.counters()["forward_runs"] == 5


def test_constants_that_are_equal_in_the_first_call_cost_none():
    def noted(module, y):
        module.flag = True
        return y + torch.tensor([1.0, 2.0, float("nan"), 4.0]).nan_to_num()

    compare(noted)
    assert torch_ort.counters()["forward_runs"] == 5


@pytest.mark.hands_over("a parameter is written into")
def test_a_set_up_that_never_ends_is_said(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def forget(module):
        module.flag = False

    with pytest.warns(FallbackWarning, match="something else in its first call"):
        compare(scale_of_the_first_rows, 6, forget)


def inverted(module, y):
    module.flag = not module.flag
    return y * (2 if module.flag else 3)


def renamed(module, y):
    module.name = {"a": "b", "b": "a"}[module.name]
    return y * (2 if module.name == "a" else 3)


@pytest.mark.parametrize("function", [inverted, renamed])
def test_constants_that_take_turns_run_in_pytorch(function, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with pytest.warns(FallbackWarning, match="forward assigns"):
        compare(function)


def test_numbers_that_take_turns_are_replayed():
    def alternated(module, y):
        module.count = 1 - module.count
        return y * (module.count + 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(alternated)
    assert torch_ort.counters()["forward_runs"] == 5


@pytest.mark.parametrize("value", [3, 0.5])
def test_numbers_that_the_loop_and_forward_assign(value):
    steps = iter(range(20))

    def assign(module):
        module.count = type(value)(next(steps) // 2)

    def reset(module, y):
        y = y * module.count
        module.count = value
        return y

    compare(reset, 6, assign)
    counters = torch_ort.counters()
    assert counters["calls_left_to_eager"] <= 1
    assert counters["fallbacks"] == 0
