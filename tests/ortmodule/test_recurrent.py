# torch.nn's recurrent layers inside an ORTModule: whole, and one graph for all lengths.
from __future__ import annotations

import copy

import pytest
import torch
from recurrent_kinds import KINDS
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import torch_ort
from torch_ort import ORTModule
from torch_ort.core.policy import ORTModuleFallbackException
from torch_ort.pytorch.module_compat import pytree


class Net(nn.Module):
    """A layer between others, so that what it gets and gives lies in memory of the engine."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.layer = kind(8, 5, **settings)
        self.after = nn.LazyLinear(3)

    def forward(self, x, states=None):
        y, states = self.layer(torch.tanh(self.before(x)), states)
        return self.after(y * 2), states


def compare(net, inputs, captures=1, with_grad=True, rtol=1e-4, atol=1e-5):
    """Train a copy in eager and one in the engine on the same inputs."""
    with torch.no_grad():
        net(*inputs[0])  # makes lazy parameters
    eager, inner = net, copy.deepcopy(net)
    ours = ORTModule(inner)
    for given in inputs:
        results = []
        for model in (eager, ours):
            torch.manual_seed(1)
            leaves = [
                x.detach().clone().requires_grad_(with_grad) for x in pytree.tree_leaves(given)
            ]
            flat = iter(leaves)
            args = pytree.tree_map(lambda x, flat=flat: next(flat), given)
            with torch.set_grad_enabled(with_grad):
                y, states = model(*args)
            tensors = [y, *states] if isinstance(states, tuple) else [y, states]
            model.zero_grad()
            if with_grad:
                sum(t.float().pow(2).sum() for t in tensors).backward()
            grads = [p.grad for p in model.parameters()] + [x.grad for x in leaves]
            results.append((tensors, grads))
        torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=atol)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["graphs_captured"] == captures
    assert counters["backward_runs"] == (len(inputs) if with_grad else 0)
    return ours


def lengths(batch_first=False):
    shapes = [(5, 2), (9, 3), (1, 1), (5, 2), (2, 7)]
    return [(torch.randn(*(reversed(s) if batch_first else s), 6),) for s in shapes]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_first": True},
        {"bidirectional": True, "num_layers": 2, "dropout": 0.3},
        {"bias": False},
    ],
    ids=["plain", "batch_first", "deep", "no_bias"],
)
def test_one_graph_for_all_lengths(kind, settings):
    compare(Net(kind, **settings), lengths(settings.get("batch_first", False)))


def test_projections():
    compare(Net(nn.LSTM, proj_size=3, num_layers=2), lengths())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_first", [False, True])
def test_given_states(kind, batch_first):
    def states(rows):
        made = [torch.randn(2, rows, 5) for _ in range(2 if kind is nn.LSTM else 1)]
        return tuple(made) if kind is nn.LSTM else made[0]

    inputs = [(x, states(x.shape[0 if batch_first else 1])) for (x,) in lengths(batch_first)]
    compare(Net(kind, num_layers=2, batch_first=batch_first), inputs)


def test_sequences_without_a_batch():
    compare(Net(nn.GRU), [(torch.randn(n, 6),) for n in (4, 7, 2)])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_without_gradients(kind):
    compare(Net(kind).eval(), lengths(), with_grad=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_under_autocast(kind):
    class Mixed(Net):
        forward = torch.autocast("cpu", torch.bfloat16)(Net.forward)

    compare(Mixed(kind), lengths(), rtol=5e-2, atol=5e-2)


def test_several_calls_before_a_backward_and_a_graph_that_is_kept():
    eager = nn.LSTM(4, 3)
    ours = ORTModule(copy.deepcopy(eager))
    x = [torch.randn(n, 2, 4) for n in (3, 5)]
    for model in (eager, ours):
        first, second = (model(given)[0].pow(2).sum() for given in x)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    for got, want in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    assert torch_ort.counters()["graphs_captured"] == 1


def test_edits_of_weights_before_backward_raise():
    ours = ORTModule(nn.GRU(4, 3))
    loss = ours(torch.randn(2, 2, 4))[0].sum()
    with torch.no_grad():
        ours.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_layers_that_were_moved_or_got_other_weights():
    eager = nn.LSTM(4, 3)
    ours = ORTModule(copy.deepcopy(eager))
    for change in (
        lambda layer: layer,
        lambda layer: layer.double(),
        lambda layer: setattr(layer, "weight_ih_l0", nn.Parameter(torch.ones(12, 4).double())),
    ):
        change(eager), change(ours.module)
        x = torch.randn(3, 2, 4, dtype=eager.weight_hh_l0.dtype)
        for model in (eager, ours):
            model.zero_grad()
            model(x)[0].pow(2).sum().backward()
        for got, want in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
    assert torch_ort.counters()["backward_runs"] == 3


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 3)

    def forward(self, x, counts=None):
        packed = x if counts is None else pack_padded_sequence(x, counts, enforce_sorted=False)
        return self.layer(packed)[1]


@pytest.mark.hands_over("sizes of packed sequences are data")
def test_packed_sequences_say_why_they_run_in_pytorch():
    ours, x = ORTModule(Packing()), torch.randn(5, 2, 4)
    with pytest.raises(
        ORTModuleFallbackException, match="pack_padded_sequence: the sizes of a pack"
    ):
        ours(x, torch.tensor([5, 3]))


@pytest.mark.hands_over("sizes of packed sequences are data")
def test_packed_sequences_run_in_pytorch(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, x = Packing(), torch.randn(5, 2, 4)
    ours = ORTModule(copy.deepcopy(eager))
    with pytest.warns(UserWarning, match="runs from now on in plain PyTorch"):
        torch.testing.assert_close(
            ours(pack_sequence([x[:, 0], x[:3, 1]])), eager(pack_sequence([x[:, 0], x[:3, 1]]))
        )
    counts = torch.tensor([5, 3])
    torch.testing.assert_close(ours(x, counts), eager(x, counts))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_in_scripts(kind):
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(6, 5, num_layers=2, bidirectional=True)

        def forward(self, x):
            return self.layer(x)

    eager = Called()
    ours = ORTModule(torch.jit.script(copy.deepcopy(eager)))
    for (x,) in lengths():
        for model in (eager, ours):
            model.zero_grad()
            model(x)[0].pow(2).sum().backward()
        for got, want in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["graphs_captured"] == 1
    assert counters["backward_runs"] == 5
