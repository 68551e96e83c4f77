# Functions that libraries assign to `forward` of an ORTModule: captured, or run around the engine.
from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleFallbackException


class Net(nn.Module):
    """Its hook doubles what forward gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = 2.0
        self.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        return self.linear(x).relu() * self.scale


def tripled(self, x, weight=1.0):
    return self.linear(x) * 3 * weight


def of_scripts(self, x):
    """Branch on data, which no graph can do."""
    y = self.linear(x)
    return y * 2 if y.sum() > 1e9 else y * 3


def doubled(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * 2 + 1

    return call


class Converts:
    """An object in place of a function, as Accelerate has them."""

    def __init__(self, forward: Callable) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return -self.forward(*args, **kwargs)


def rows() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair() -> tuple[Net, ORTModule]:
    torch.manual_seed(0)
    eager = Net()
    return eager, ORTModule(copy.deepcopy(eager))


def assert_same_step(eager: nn.Module, ours: ORTModule) -> None:
    results = []
    for module in (eager, ours):
        module.zero_grad()
        result = module(rows())
        result.square().sum().backward()
        results.append([result, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(results[1], results[0])


def counted() -> tuple[int, ...]:
    counters = torch_ort.counters()
    names = ("graphs_captured", "forward_runs", "fallbacks", "calls_left_to_eager")
    return tuple(counters[name] for name in names)


# What is assigned, given the module, in eager and here.
FUNCTIONS: dict[str, Callable[[Any], Callable]] = {
    "a function": lambda module: lambda x: module.linear(x) * 3,
    "a method": lambda module: types.MethodType(tripled, module),
    "a partial": lambda module: functools.partial(tripled, module, weight=2.0),
    "around the method": lambda module: doubled(module.forward),
    "around the function": lambda module: types.MethodType(
        doubled(module.forward.__func__), module
    ),
    "an object around it": lambda module: Converts(module.forward),
    "a partial around it": lambda module: functools.partial(
        lambda run, x: run(x) * 2, module.forward
    ),
    "around something that is around it": lambda module: doubled(Converts(module.forward)),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
class TestFunctions:
    def test_steps_are_those_of_eager_in_the_engine(self, kind, pair):
        for module in pair:
            module.forward = FUNCTIONS[kind](module)
        for _ in range(2):
            assert_same_step(*pair)
        assert counted() == (1, 2, 0, 0)

    def test_after_a_first_call(self, kind, pair):
        assert_same_step(*pair)
        for module in pair:
            module.forward = FUNCTIONS[kind](module)
        assert_same_step(*pair)
        _, runs, *others = counted()
        assert (runs, others) == (2, [0, 0])

    def test_taken_off_again(self, kind, pair):
        _, ours = pair
        assert_same_step(*pair)
        for module in pair:
            module.forward = FUNCTIONS[kind](module)
        assert_same_step(*pair)
        captured, *_ = counted()
        for module in pair:
            del module.forward
        assert_same_step(*pair)
        assert counted() == (captured, 3, 0, 0)  # the first graph is still there
        assert "forward" not in vars(ours.module)
        for module in pair:
            with pytest.raises(AttributeError, match="forward"):
                del module.forward

    def test_put_back(self, kind, pair):
        assert_same_step(*pair)
        before = [module.forward for module in pair]
        for module in pair:
            module.forward = FUNCTIONS[kind](module)
        assert_same_step(*pair)
        captured, *_ = counted()
        for module, forward in zip(pair, before, strict=True):
            module.forward = forward
        assert_same_step(*pair)
        assert counted() == (captured, 3, 0, 0)

    def test_no_hook_runs_twice(self, kind, pair):
        for module in pair:
            module.forward = FUNCTIONS[kind](module)
        direct = [module.forward(rows()) for module in pair]
        called = [module(rows()) for module in pair]
        torch.testing.assert_close(called[1], called[0])
        # The method of an ORTModule is the module with its hooks.
        assert direct[1].shape == direct[0].shape


def test_one_around_another_as_accelerate_does(pair):
    for module in pair:
        for _ in range(3):
            around = doubled(module.forward.__func__)
            module.forward = types.MethodType(around, module)
            assert module.forward.__func__.__name__ == "forward"
    for _ in range(2):
        assert_same_step(*pair)
    assert counted() == (1, 2, 0, 0)


def test_the_signature_is_that_of_the_function(pair):
    eager, ours = pair
    for module in pair:
        module.forward = types.MethodType(tripled, module)
    assert inspect.signature(ours.forward) == inspect.signature(eager.forward)
    assert ours.forward.__name__ == "tripled"
    assert not hasattr(ours.forward, "__wrapped__")
    del ours.forward
    assert list(inspect.signature(ours.forward).parameters) == ["x"]


def test_one_after_another(pair):
    for count in (2, 3, 4, 3, 2):
        for module in pair:
            module.forward = lambda x, module=module, count=count: module.linear(x) * count
        assert_same_step(*pair)
    assert counted()[1:] == (5, 0, 0)


def test_the_same_again_needs_no_capture(pair):
    functions = [lambda x, module=module: module.linear(x) * 3 for module in pair]
    for _ in range(3):
        for module, function in zip(pair, functions, strict=True):
            module.forward = function
        assert_same_step(*pair)
        for module in pair:
            del module.forward
        assert_same_step(*pair)
    assert counted() == (2, 6, 0, 0)


def test_the_module_that_is_wrapped_has_it(pair):
    _, ours = pair
    ours.forward = types.MethodType(tripled, ours)
    torch.testing.assert_close(ours.module(rows()), ours(rows()))
    assert ours.module.forward.__self__ is ours.module


def test_what_was_replaced_can_be_called_without_being_seen(pair):
    """A function finds what it has replaced in an attribute, as that of a hook of Accelerate's."""
    for module in pair:
        kept = {}
        module.kept = kept
        kept["before"] = module.forward
        module.forward = lambda x, module=module: module.kept["before"](x) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert_same_step(*pair)
    assert counted()[2:] == (0, 0)


@pytest.mark.hands_over("Python asks for a number")
def test_one_that_cannot_be_captured_is_told_once(pair, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, ours = Net(), None
    ours = ORTModule(copy.deepcopy(eager))
    for module in (eager, ours):
        module.forward = types.MethodType(of_scripts, module)
    with pytest.warns(FallbackWarning, match="data-dependent"):
        assert_same_step(eager, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(eager, ours)
    assert counted()[1:] == (0, 1, 2)
    for module in (eager, ours):
        del module.forward
    assert_same_step(eager, ours)  # the module's own was never the cause
    assert counted()[1:] == (1, 1, 2)


@pytest.mark.hands_over("Python asks for a number")
def test_one_that_cannot_be_captured_is_an_error_where_the_policy_says_so(pair):
    _, ours = pair
    ours.forward = types.MethodType(of_scripts, ours)
    with pytest.raises(ORTModuleFallbackException, match="data-dependent"):
        ours(rows())


def test_the_code_around_runs_in_each_call(pair):
    calls = []
    for module in pair:

        def counts(x, forward=module.forward):
            calls.append(len(x))
            return forward(x)

        module.forward = counts
    for _ in range(3):
        assert_same_step(*pair)
    assert calls == [5] * 6
    assert counted() == (1, 3, 0, 0)


@pytest.mark.parametrize("bound", [True, False])
def test_one_that_replaces_forward_in_some_calls_alone(bound, pair):
    """TRL keeps the forward for generation, and has another one for training."""

    def chooses(module: Any, before: Callable) -> Callable:
        def forward(self, x, fused=False):
            return tripled(self, x) if fused else before(x)

        method = types.MethodType(forward, module)
        return method if bound else lambda x, fused=False: method(x, fused)

    for module in pair:
        module.forward = chooses(module, module.forward)
    for fused in (False, True, True, False, True):
        results = []
        for module in pair:
            module.zero_grad()
            module(rows(), fused=fused).square().sum().backward()
            results.append([parameter.grad for parameter in module.parameters()])
        torch.testing.assert_close(results[1], results[0])
    assert counted()[1:] == (4, 0, 1)


@pytest.mark.parametrize("make", [Net, lambda: nn.Linear(6, 3)], ids=["with_hooks", "without"])
def test_forward_redirected_for_a_call(make):
    """Lightning calls other methods of a module through its forward, to run them inside of DDP."""
    eager = make()
    ours = ORTModule(copy.deepcopy(eager))

    def redirected(module: Any, x: torch.Tensor) -> torch.Tensor:
        before = module.forward

        def method(x):
            module.forward = before
            return module(x * 2).sum()

        module.forward = method
        return module(x)

    for _ in range(3):
        torch.testing.assert_close(redirected(ours, rows()), redirected(eager, rows()))
    assert counted() == (1, 3, 0, 0)


def test_copies(pair):
    for module in pair:
        module.forward = types.MethodType(tripled, module)
    others = [copy.deepcopy(module) for module in pair]
    with torch.no_grad():
        for module in others:
            module.linear.weight.mul_(2)
    assert_same_step(*others)
    for module in others:
        del module.forward
    assert_same_step(*others)
    assert_same_step(*pair)
    assert counted()[2:] == (0, 0)


def test_a_copy_has_no_function_around_forward(pair):
    """It would call the ORTModule that was copied."""
    eager, ours = pair
    ours.forward = doubled(ours.forward)
    assert_same_step(eager, copy.deepcopy(ours))


def test_pickles_have_what_pickles_of_the_module_have():
    ours = ORTModule(nn.Linear(6, 3))
    ours.forward = scaled
    other = pickle.loads(pickle.dumps(ours))
    torch.testing.assert_close(other(rows()), scaled(rows()))
    assert other.module.forward is scaled


def scaled(x):
    return x * 5


def test_of_an_ortmodule_in_an_ortmodule(pair):
    eager, inner = pair
    ours = ORTModule(inner)
    for module in (eager, ours):
        module.forward = types.MethodType(tripled, module)
    assert_same_step(eager, ours)
    for module in (eager, ours):
        del module.forward
    assert_same_step(eager, ours)
    assert counted()[2:] == (0, 0)
