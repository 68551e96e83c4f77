"""Outputs that the loss does not use: they give no gradient at all, as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injection import into_backward
from torch import nn
from torch_ort._C import InternalError

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning


class Net(nn.Module):
    """Two linear layers and what a test makes of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.first(x), self.second(x), x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 2, y * 3

    @staticmethod
    def backward(ctx, of_x, of_y):
        return of_x * 2, of_y * 3


def joined(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor) -> tuple:
    h = (first.relu() + x).softmax(-1)
    return h.log() * 3, (h * 0).sqrt() + second.tanh(), h.mean(), second.exp()


FUNCTIONS = {
    "apart": lambda a, b, x: (a, b),
    # sqrt at 0 has an infinite gradient, and log at 0: zeros times these are NaN
    "infinite gradients": lambda a, b, x: (a, (a * 0).sqrt(), (b - b).log(), (x - x).log()),
    "joined": joined,
    "views": lambda a, b, x: (a, a.t(), a[1:] * 2, b.view(-1)),
    "norms and losses": lambda a, b, x: (
        F.layer_norm(a, (4,)) * (a - a).sqrt(),
        F.cross_entropy(b, torch.zeros(x.shape[0], dtype=torch.long)),
        F.batch_norm(a, None, None, training=True),
    ),
    "concatenations": lambda a, b, x: (
        a[:, :2].exp(),
        a[:, 2:].log(),
        torch.cat([a, b], 1),
        torch.stack([a, (b * 0).sqrt()]),
    ),
    "products": lambda a, b, x: (a @ b.t(), (b * 0).sqrt() @ x.t(), a.t() @ a),
    "a Function": lambda a, b, x: (*Doubled.apply(a, (b * 0).sqrt()), a),
    "no path": lambda a, b, x: (a, b.floor() * 2, b.detach() + x),
}


def pair(function: Callable[..., Any], road: str) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    eager = Net(function)
    ours = copy.deepcopy(eager)
    wrapped = ORTModule(ours) if road == "module" else torch.compile(ours, backend="ort")
    return eager, ours, wrapped


def gradients(call: Any, module: nn.Module, used: Sequence[int], **settings: Any) -> dict:
    module.zero_grad()
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    outputs = call(x)
    loss = sum(outputs[i].square().sum() for i in used)
    loss.backward(**settings)
    if settings:
        loss.backward()
    return {"x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def assert_same(got: dict, want: dict, words: Any = "") -> None:
    assert [name for name, g in got.items() if g is None] == [
        name for name, g in want.items() if g is None
    ], words
    for name in want:
        if want[name] is not None:
            torch.testing.assert_close(
                got[name], want[name], equal_nan=True, rtol=1e-4, atol=1e-5,
                msg=lambda text, name=name: f"{words}: {name}: {text}",
            )  # fmt: skip


def patterns(count: int) -> list[tuple[int, ...]]:
    """Give each output alone, all but one, and all."""
    alone = [(i,) for i in range(count)]
    without = [tuple(j for j in range(count) if j != i) for i in range(count)] if count > 2 else []
    return [*alone, *without, tuple(range(count))]


@pytest.mark.parametrize(
    ("name", "road"),
    [*((name, "module") for name in FUNCTIONS), ("joined", "compile"), ("views", "compile")],
)
def test_each_output_alone_and_in_turns(name, road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    eager, ours, wrapped = pair(FUNCTIONS[name], road)
    count = len(eager(torch.zeros(3, 4)))
    for used in patterns(count) * 2:
        want, got = gradients(eager, eager, used), gradients(wrapped, ours, used)
        assert_same(got, want, used)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["graphs_captured"] == counters["graphs_recorded"] == 1
    assert counters["contexts_live"] == 0


@pytest.mark.parametrize("used", [(0,), (1, 2), (3,)])
def test_a_graph_that_is_kept(used):
    eager, ours, wrapped = pair(joined, "module")
    for _ in range(2):
        want = gradients(eager, eager, used, retain_graph=True)
        assert_same(gradients(wrapped, ours, used, retain_graph=True), want)


def test_gradients_that_keep_a_graph():
    eager, ours, wrapped = pair(joined, "module")
    for module, call in ((eager, eager), (ours, wrapped)):
        found = torch.autograd.grad(
            call(torch.ones(3, 4))[3].sum(), list(module.parameters()), create_graph=True,
            allow_unused=True,
        )  # fmt: skip
        assert [gradient is None for gradient in found] == [True, True, False, False]


def test_hooks_that_move_what_is_saved():
    eager, ours, wrapped = pair(joined, "module")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        assert_same(gradients(wrapped, ours, (3,)), gradients(eager, eager, (3,)))


def test_sizes_change():
    eager, ours, wrapped = pair(joined, "module")
    for count in (3, 1, 5, 3):
        for module, call in ((eager, eager), (ours, wrapped)):
            module.zero_grad()
            call(torch.ones(count, 4))[1].sum().backward()
        assert_same(
            {name: p.grad for name, p in ours.named_parameters()},
            {name: p.grad for name, p in eager.named_parameters()},
        )


def test_weights_that_no_gradient_reaches_stay_where_they_are():
    eager, ours, wrapped = pair(FUNCTIONS["apart"], "module")
    before = copy.deepcopy(ours.second.state_dict())
    for module, call in ((eager, eager), (ours, wrapped)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            call(torch.ones(3, 4))[0].sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.second.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())


def test_hooks_that_wait_for_a_gradient_get_zeros():
    """Eager PyTorch would not call them; called with None, they might fail."""
    _, ours, wrapped = pair(FUNCTIONS["apart"], "module")
    seen = []
    ours.second.weight.register_hook(lambda gradient: seen.append(gradient.abs().sum().item()))
    wrapped(torch.ones(3, 4))[0].sum().backward()
    assert seen == [0]
    assert ours.second.bias.grad is None


def test_a_first_backward_that_fails(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, ours, wrapped = pair(joined, "module")
    want = gradients(eager, eager, (3,))

    def failing(run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any) -> Any:
            raise InternalError("on purpose")

        return backward

    into_backward(monkeypatch, failing)
    with pytest.warns(FallbackWarning, match="on purpose"):
        got = gradients(wrapped, ours, (3,))
    assert_same(got, want)


def test_outputs_of_two_calls_at_once():
    eager, ours, wrapped = pair(joined, "module")
    for call in (eager, wrapped):
        a, b = call(torch.ones(3, 4)), call(torch.zeros(3, 4))
        (a[0].sum() + b[3].sum()).backward()
    assert_same(
        {name: p.grad for name, p in ours.named_parameters()},
        {name: p.grad for name, p in eager.named_parameters()},
    )
