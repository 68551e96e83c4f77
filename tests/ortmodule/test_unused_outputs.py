"""Outputs that the loss does not use: they give no gradient at all, as in eager PyTorch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import injection
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
    "norms and losses": lambda a, b, x: (F.layer_norm(a, (4, )) * (a - a).sqrt(),
        F.cross_entropy(b, torch.zeros(x.shape[0], dtype=torch.long)),
        F.batch_norm(a, None, None, training=True)),
    "concatenations": lambda a, b, x: (a[:, :2].exp(), a[:, 2:].log(), torch.cat([a, b], 1),
        torch.stack([a, (b * 0).sqrt()])),
    "products": lambda a, b, x: (a @ b.t(), (b * 0).sqrt() @ x.t(), a.t() @ a),
    # zeros times the second factor are NaN
    "products of one tensor": lambda a, b, x: (a @ x.new_ones(4, 4),
        a @ x.new_full((4, 4), torch.inf), a @ b.t()),
    "a table": lambda a, b, x: (a @ x.new_full((4, 4), torch.inf),
        F.embedding(torch.zeros(3, dtype=torch.long), a) * torch.inf, a.exp()),
    "a Function": lambda a, b, x: (*Doubled.apply(a, (b * 0).sqrt()), a),
    "no path": lambda a, b, x: (a, b.floor() * 2, b.detach() + x),
}  # fmt: skip


def pair(function: Callable[..., Any], road: str) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    eager = Net(function)
    ours = copy.deepcopy(eager)
    wrapped = ORTModule(ours) if road == "module" else torch.compile(ours, backend="ort")
    return eager, ours, wrapped


def of_parameters(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def gradients(call: Any, module: nn.Module, used: Sequence[int], **settings: Any) -> dict:
    module.zero_grad()
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    outputs = call(x)
    loss = sum(outputs[i].square().sum() for i in used)
    loss.backward(**settings)
    if settings:
        loss.backward()
    return {"x": x.grad} | of_parameters(module)


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
def test_each_output_alone_and_in_turns(name, road, live_contexts, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    eager, ours, wrapped = pair(FUNCTIONS[name], road)
    count = len(eager(torch.zeros(3, 4)))
    for used in patterns(count) * 2:
        want, got = gradients(eager, eager, used), gradients(wrapped, ours, used)
        assert_same(got, want, used)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["graphs_captured"] == counters["graphs_recorded"] == 1
    assert live_contexts() == 0


@pytest.mark.parametrize(
    "steps", [[(0,)] * 2, [(1, 2)] * 2, [(3,), (3,), (3,), (0, 1, 2, 3), (3,)]], ids=str
)
def test_graphs_that_are_kept(steps):
    eager, ours, wrapped = pair(joined, "module")
    for used in steps:
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


def test_sizes_change():
    eager, ours, wrapped = pair(joined, "module")
    for count in (3, 1, 5, 3):
        for module, call in ((eager, eager), (ours, wrapped)):
            module.zero_grad()
            call(torch.ones(count, 4))[1].sum().backward()
        assert_same(of_parameters(ours), of_parameters(eager))


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


def test_a_backward_that_was_not_expected_fails_and_leaves_nothing(live_contexts):
    """An output that backward reads refers to the node that owns the call."""
    eager, ours, wrapped = pair(lambda a, b, x: (a.mean(), a.tanh()), "compile")
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    mean, tanh = wrapped(x)
    injection.at_place("region", lambda: RuntimeError("no region"))
    with pytest.raises(RuntimeError, match="no region"):
        (mean + tanh.sum()).backward()
    torch_ort._C.set_failpoint(None)
    del mean, tanh
    gc.collect()
    assert live_contexts() == 0
    assert_same(gradients(wrapped, ours, (0, 1)), gradients(eager, eager, (0, 1)))


def test_outputs_of_two_calls_at_once():
    eager, ours, wrapped = pair(joined, "module")
    for call in (eager, wrapped):
        a, b = call(torch.ones(3, 4)), call(torch.zeros(3, 4))
        (a[0].sum() + b[3].sum()).backward()
    assert_same(of_parameters(ours), of_parameters(eager))


class Classifier(nn.Module):
    """A loss beside what it is of, and more: with dropout, and with a batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 5)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.dropout(self.norm(self.first(x)), 0.2, self.training).relu()
        logits = self.second(hidden)
        labels = torch.arange(len(x)) % 5
        return F.cross_entropy(logits, labels), logits, hidden


def losses(call: Any, module: nn.Module, used: Sequence[Sequence[int]]) -> list[float]:
    """Train with the sum of the outputs that each step names."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)
    found = []
    for step, outputs in enumerate(used):
        optimizer.zero_grad()
        numbers = torch.Generator().manual_seed(step)
        results = call(torch.randn(3 + step % 2, 4, generator=numbers))
        loss = sum(results[i].mean() for i in outputs)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.hands_over("Dynamo gives a norm's eps as a tensor (dynamic=True)")
@pytest.mark.parametrize(
    "used",
    [[(0,)] * 6, [(0,)] * 3 + [(1, 2)] * 3 + [(0, 1, 2)] * 2 + [(0,)] * 2, [(0,), (2,)] * 4],
    ids=["the loss", "in stretches", "in turns"],
)
@pytest.mark.parametrize("road", ["module", "compile"])
def test_outputs_of_the_last_step_are_those_of_the_next(used, road, live_contexts, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.manual_seed(0)
    eager = Classifier()
    ours = copy.deepcopy(eager)
    call = ORTModule(ours) if road == "module" else torch.compile(ours, backend="ort", dynamic=True)
    assert losses(call, ours, used) == pytest.approx(losses(eager, eager, used), rel=1e-5)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-6)
    assert torch_ort.counters()["fallbacks"] == live_contexts() == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_output_step_after_step(name, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    eager, ours, wrapped = pair(FUNCTIONS[name], "module")
    for used in patterns(len(eager(torch.zeros(3, 4)))):
        want = gradients(eager, eager, used)
        for _ in range(3):
            assert_same(gradients(wrapped, ours, used), want, used)
    assert torch_ort.counters()["fallbacks"] == 0


class Heads(nn.Module):
    """Layers of one tensor, of which the loss may use the first or the last alone."""

    def __init__(self, count: int, is_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.is_first = nn.Linear(4, 16), is_first
        self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(count))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.first(x).relu()
        results = [head(hidden) for head in self.heads]
        return [result.sum() for result in (results if self.is_first else results[::-1])]


class LossAlone(Classifier):
    def forward(self, x):
        return super().forward(x)[0]


def costs(module: nn.Module) -> dict[str, int]:
    """Give what a steady step counts."""
    module.norm = nn.Identity()
    wrapped = ORTModule(module)
    names = ("steps_out", "steps_region", "steps_product", "steps_functional",
             "gradients_delivered")  # fmt: skip
    found = {}
    for _ in range(4):
        module.zero_grad()
        before = torch_ort.counters()
        results = wrapped(torch.ones(64, 4))
        (results if torch.is_tensor(results) else results[0]).backward()
        after = torch_ort.counters()
        found = {name: after[name] - before[name] for name in (*names, "plans")}
    return found


def test_a_step_with_unused_outputs_costs_what_one_without_them_does(monkeypatch):
    """As many kernels run, and all gradients are delivered."""
    # Logits that leave have all their rows; those of the loss alone have the labelled ones.
    monkeypatch.setenv("TORCH_ORT_DISABLE", "row_sparsity")
    with_logits, alone = costs(Classifier()), costs(LossAlone())
    assert with_logits == alone
    assert alone["gradients_delivered"] == 4


@pytest.mark.parametrize("road", ["module", "compile"])
def test_a_first_step_expects_the_gradient_of_the_loss(road):
    """It makes the plan of all steps, and no other."""
    module = Classifier()
    call = ORTModule(module) if road == "module" else torch.compile(module, backend="ort")
    names = ("plans", "contexts_created")
    for want in (1, 0):
        module.zero_grad()
        before = torch_ort.counters()
        call(torch.ones(64, 4))[0].backward()
        after = torch_ort.counters()
        assert [after[name] - before[name] for name in names] == [want, want]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_product_that_is_left_of_a_sum_is_all_that_runs(is_first, monkeypatch):
    found = costs(Heads(3, is_first))
    assert found["gradients_delivered"] == 4
    monkeypatch.setenv("TORCH_ORT_DISABLE", "accumulate_sums")
    assert found == costs(Heads(3, is_first))


def test_a_second_backward_of_other_outputs():
    """One call, two backwards, neither of which is the expected one."""
    eager, ours, wrapped = pair(joined, "module")
    gradients(wrapped, ours, (3,))
    for module, call in ((eager, eager), (ours, wrapped)):
        module.zero_grad()
        outputs = call(torch.ones(3, 4))
        outputs[0].sum().backward(retain_graph=True)
        outputs[1].square().sum().backward()
    assert_same(of_parameters(ours), of_parameters(eager))


def test_hooks_that_move_what_is_saved_step_after_step():
    eager, ours, wrapped = pair(joined, "module")
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            assert_same(gradients(wrapped, ours, (3,)), gradients(eager, eager, (3,)))
        assert_same(gradients(wrapped, ours, (3,)), gradients(eager, eager, (3,)))


def test_a_saved_input_that_is_edited_is_noticed():
    _, ours, wrapped = pair(joined, "module")
    gradients(wrapped, ours, (3,))
    x = torch.ones(3, 4)
    outputs = wrapped(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[3].sum().backward()
