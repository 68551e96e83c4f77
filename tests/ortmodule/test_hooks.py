"""Hooks under an ORTModule do what they do in eager: in the graph if they only compute."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.guards.hooks import only_computes

pytestmark = pytest.mark.ort_only

X = torch.randn(5, 6)
SCALE = 3.0
SEEN: list[Any] = []


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def told(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, FallbackWarning)]


@pytest.fixture
def lenient(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")


def keep_in_list(store):
    return lambda module, args, output: store.append(output)


def keep_in_dict(store):
    values = {}
    store.append(values)

    def hook(module, args, output):
        values[len(values)] = output.detach()

    return hook


def keep_on_function(store):
    def hook(module, args, output):
        hook.last = output
        store.append(hook.last)

    return hook


class Keeps:
    def __init__(self, store) -> None:
        self.store = store

    def __call__(self, module, args, output):
        self.store.append(output.detach())

    def method(self, module, args, output):
        self(module, args, output)


STORING = {
    "list": keep_in_list,
    "dict": keep_in_dict,
    "function": keep_on_function,
    "object": Keeps,
    "method": lambda store: Keeps(store).method,
}


@pytest.mark.parametrize("kind", STORING)
def test_activations_that_a_hook_keeps(kind, lenient):
    model = network()
    expected = [model[:2](x) for x in (X, X + 1, X * 2)]
    wrapped, store = ORTModule(model), []
    wrapped(X)  # captured before the hook comes
    handle = model[1].register_forward_hook(STORING[kind](store))
    messages = told(lambda: [wrapped(x).sum().backward() for x in (X, X + 1, X * 2)])
    (message,) = messages
    assert "ORTModuleONNXModelException: module '1' has a forward hook, " in message
    assert "which may do more than compute" in message
    assert "; calls with it run in plain PyTorch" in message
    kept = list(store[0].values()) if kind == "dict" else store
    torch.testing.assert_close(kept, expected)
    handle.remove()
    runs = torch_ort.counters()["forward_runs"]
    torch.testing.assert_close(wrapped(X), model(X))
    assert torch_ort.counters()["forward_runs"] == runs + 1, "the engine runs it again"
    assert torch_ort.counters()["graphs_captured"] == 1


def test_a_pre_hook_that_counts(lenient):
    model, seen = network(), []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    wrapped = ORTModule(model)
    assert len(told(lambda: [wrapped(X) for _ in range(3)])) == 1
    assert seen == [1, 1, 1]


def test_a_hook_that_prints(lenient, capsys):
    model = network()
    model[0].register_forward_hook(lambda module, args, output: print(output.shape))
    wrapped = ORTModule(model)
    told(lambda: [wrapped(X) for _ in range(3)])
    assert capsys.readouterr().out == "torch.Size([5, 8])\n" * 3


def test_a_hook_for_all_modules(lenient):
    model, seen = network(), []
    wrapped = ORTModule(model)
    wrapped(X)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(type(module)) or None
    )
    try:
        messages = told(lambda: wrapped(X))
        assert seen == [nn.Linear, nn.GELU, nn.Linear, nn.Sequential, ORTModule]
    finally:
        handle.remove()
    assert len(messages) == 1
    assert "a hook for all modules" in messages[0]
    wrapped(X)
    assert torch_ort.counters()["forward_runs"] == 2


def test_strict_raises():
    model = network()
    model[1].register_forward_hook(keep_in_list([]))
    with pytest.raises(Exception, match=r"module '1' has a forward hook, '<lambda>' \(test_hooks"):
        ORTModule(model)(X)


@pytest.mark.hands_over("nothing captures hooks of backward")
def test_full_backward_hooks_run_at_every_backward(lenient):
    model, seen = network(), []
    model[1].register_full_backward_hook(lambda module, given, made: seen.append(made[0]))
    wrapped = ORTModule(model)
    messages = told(lambda: [wrapped(X).sum().backward() for _ in range(2)])
    assert len(messages) == 1
    assert "has backward hooks" in messages[0]
    assert [gradient.shape for gradient in seen] == [(5, 8), (5, 8)]


class OnTensor(nn.Module):
    """Puts something on an activation in its forward."""

    def __init__(self, put: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.put = put

    def forward(self, x):
        y = self.linear(x)
        self.put(y)
        return y.exp(), y


ON_TENSOR = {
    "register_hook": lambda y: y.register_hook(SEEN.append),
    "retain_grad": lambda y: y.retain_grad(),
}


@pytest.mark.hands_over("nothing captures hooks of backward")
@pytest.mark.parametrize("name", ON_TENSOR)
def test_hooks_on_tensors_run_at_every_backward(name, lenient):
    SEEN.clear()
    wrapped = ORTModule(OnTensor(ON_TENSOR[name]))

    def run():
        for _ in range(2):
            result, y = wrapped(X)
            result.sum().backward()
            if name == "retain_grad":
                SEEN.append(y.grad)
            torch.testing.assert_close(SEEN[-1], result.detach())

    (message,) = told(run)
    assert f"forward calls Tensor.{name}, whose effect a captured graph would not have" in message
    assert len(SEEN) == 2


def test_a_hook_on_a_tensor_that_computes_is_in_the_graph():
    model = OnTensor(lambda y: y.register_hook(lambda gradient: gradient * 3))
    expected = copy.deepcopy(model)
    ORTModule(model)(X)[0].sum().backward()
    expected(X)[0].sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, expected.linear.weight.grad)
    assert torch_ort.counters()["backward_runs"] == 1


class OnInput(nn.Module):
    """Puts a hook on its argument, or on its parameter."""

    def __init__(self, chosen: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.chosen = chosen

    def forward(self, x):
        tensor = x if self.chosen == "argument" else self.linear.weight
        tensor.register_hook(lambda gradient: gradient * 0.5)
        return self.linear(x)


@pytest.mark.parametrize("is_handed_over", [False, True])
@pytest.mark.parametrize("chosen", ["argument", "parameter"])
def test_hooks_on_inputs_see_gradients_of_others(chosen, is_handed_over, lenient, monkeypatch):
    if is_handed_over:
        monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    model = OnInput(chosen)
    expected = copy.deepcopy(model)
    wrapped = ORTModule(model)

    def train(call):
        x = X.clone().requires_grad_()
        (call(x).sum() + x.square().sum()).backward()
        return x.grad

    def run():
        for _ in range(2):
            torch.testing.assert_close(train(wrapped), train(expected))
            weights = model.linear.weight.grad, expected.linear.weight.grad
            torch.testing.assert_close(*weights)

    (message,) = told(run)
    assert "of an argument or a parameter, which keeps it after the call" in message


def shifted(module, args, output):
    mean = output.mean(-1, keepdim=True)
    parts = [part * SCALE for part in (output - mean).chunk(2, dim=-1)]
    return torch.cat(parts, -1) if module.training else functional.relu(output)


@pytest.mark.parametrize(
    "hook",
    [
        shifted,
        lambda module, args, output: output * 2,
        lambda module, args, output: None,
        lambda module, args, output: output + module.bias.to(torch.float32) * math.sqrt(2),
        lambda module, args, output: torch.nn.functional.silu(output),
    ],
)
def test_hooks_that_compute_are_in_the_graph(hook):
    model = network()
    model[0].register_forward_hook(hook)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    wrapped = ORTModule(model)
    for _ in range(2):
        torch.testing.assert_close(wrapped(X), model(X))
    assert torch_ort.counters()["forward_runs"] == 2
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hooks_of_torch_that_compute():
    model = network()
    torch.nn.utils.weight_norm(model[0])
    wrapped = ORTModule(model)
    torch.testing.assert_close(wrapped(X), model(X))
    assert torch_ort.counters()["forward_runs"] == 1


def counting():
    count = 0

    def hook(module, args, output):
        nonlocal count
        count += 1

    return hook


@pytest.mark.parametrize(
    "hook",
    [
        counting(),
        keep_in_list([]),
        print,
        lambda module, args, output: module.seen.append(output),
        lambda module, args, output: setattr(module, "last", output),
        lambda module, args, output: torch.save(output, "file"),
        lambda module, args, output: torch.manual_seed(0),
        lambda module, args, output: SEEN.extend([output]),
        lambda module, args, output: [SEEN.append(part) for part in output],
        lambda module, args, output: output.register_hook(print),
        lambda module, args, output: exec("pass"),
    ],
)
def test_hooks_that_may_do_more(hook):
    module = nn.Linear(2, 2)
    module.seen = []
    assert not only_computes(hook, module)
