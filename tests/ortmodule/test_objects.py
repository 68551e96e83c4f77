"""Arguments that are objects of the user's classes: batches of graphs, namespaces, caches."""

from __future__ import annotations

import argparse
import collections
import threading
import types
import weakref

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only


class Batch:
    def __init__(self, x, **fields) -> None:
        self.x, self.edges, self.name = x, {"to": torch.tensor([0, 1, 1])}, "first"
        self.__dict__.update(fields)

    @property
    def wide(self):
        return self.x * 2

    @property
    def broken(self):
        raise RuntimeError("no such thing")


class Slotted:
    __slots__ = ("empty", "scale", "x")

    def __init__(self, x, scale=2) -> None:
        self.x, self.scale = x, scale


class Store:
    """Keeps its attributes elsewhere, and knows who it belongs to."""

    def __init__(self, parent, **values) -> None:
        self.__dict__["values"] = values
        self.__dict__["parent"] = weakref.ref(parent)


class Stored:
    def __init__(self, **values) -> None:
        self.__dict__["store"] = Store(self, **values)

    def __getattr__(self, name):
        if name not in self.__dict__.get("store", Store(self)).values:
            raise AttributeError(name)
        return self.store.values[name]


class Net(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 3), function

    def forward(self, batch):
        return self.function(self.linear, batch)


def x(rows=3):
    return torch.randn(rows, 4)


TAKEN = {
    "fields": (lambda f, b: f(b.x)[b.edges["to"]], Batch),
    "property": (lambda f, b: f(b.wide), Batch),
    "slots": (lambda f, b: f(b.x) * b.scale, Slotted),
    "namespace": (lambda f, b: f(b.x) * b.k, lambda x: argparse.Namespace(x=x, k=2.5, f=print)),
    "simple namespace": (lambda f, b: f(b.x) * b.k, lambda x: types.SimpleNamespace(x=x, k=2)),
    "kept elsewhere": (lambda f, b: f(b.x) * b.k, lambda x: Stored(x=x, k=3)),
    "nested": (lambda f, b: f(b.inner.x) + f(b.x), lambda x: Batch(x, inner=Batch(x + 1))),
    "unread lock": (lambda f, b: f(b.x), lambda x: Batch(x, lock=threading.Lock())),
    "unread cycle": (lambda f, b: f(b.x), lambda x: _with_itself(Batch(x))),
    "mapping": (
        lambda f, b: f(b["x"]) * b["k"], lambda x: collections.UserDict({"x": x, "k": 2})
    ),
}  # fmt: skip


def _with_itself(batch):
    batch.again = batch
    return batch


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    function, make = TAKEN[name]
    eager = Net(function)
    ours = ORTModule(eager)
    for rows in (3, 5, 4):
        batch = make(x(rows))
        fields = dict(getattr(batch, "__dict__", {}))
        torch.testing.assert_close(ours(batch), eager(batch))
        assert getattr(batch, "__dict__", {}) == fields
        ours(batch).sum().backward()
        got, eager.linear.weight.grad = eager.linear.weight.grad, None
        eager(batch).sum().backward()
        torch.testing.assert_close(got, eager.linear.weight.grad)
        eager.linear.weight.grad = None
    assert torch_ort.counters()["graphs_captured"] == 1


def test_gradients_reach_tensors_of_objects():
    ours = ORTModule(Net(lambda f, b: f(b.x)))
    batch = Batch(x().requires_grad_())
    ours(batch).square().sum().backward()
    got, batch.x.grad = batch.x.grad, None
    ours.module(batch).square().sum().backward()
    torch.testing.assert_close(got, batch.x.grad)


def test_fields_that_forward_reads_are_compared(graphs_captured):
    net = Net(lambda f, b: f(b.x) * (2 if b.name == "second" else 1))
    ours = ORTModule(net)
    for name in ("first", "second", "first", "second"):
        batch = Batch(x())
        batch.name = name
        torch.testing.assert_close(ours(batch), net(batch))
    assert graphs_captured() == 2


def test_fields_that_forward_does_not_read_are_not_compared(graphs_captured):
    ours = ORTModule(Net(lambda f, b: f(b.x)))
    for name in ("first", "second", "third"):
        batch = Batch(x())
        batch.name = name
        ours(batch)
    assert graphs_captured() == 1


def test_another_class_is_another_graph(graphs_captured):
    class Other(Batch):
        pass

    ours = ORTModule(Net(lambda f, b: f(b.x) * (1 + isinstance(b, Other))))
    for kind in (Batch, Other, Batch):
        batch = kind(x())
        torch.testing.assert_close(ours(batch), ours.module(batch))
    assert graphs_captured() == 2


def assign(f, b):
    b.h = f(b.x)
    b.x = b.h.relu()
    b.is_done, b.inner.y = True, b.h * 2
    return b.inner.y + b.x.sum()


def test_assigned_fields_are_those_of_each_call(graphs_captured):
    net = Net(assign)
    ours = ORTModule(net)
    for rows in (3, 5, 3):
        given = x(rows)
        mine, right = (Batch(given, inner=Batch(given)) for _ in range(2))
        got, want = ours(mine), net(right)
        torch.testing.assert_close(got, want)
        for batch, result in ((mine, got), (right, want)):
            net.zero_grad()
            (result.sum() + batch.h.square().sum() + batch.inner.y.sum()).backward()
            batch.gradient = net.linear.weight.grad
        torch.testing.assert_close(
            (mine.h, mine.x, mine.inner.y, mine.gradient),
            (right.h, right.x, right.inner.y, right.gradient),
        )
        assert mine.is_done
    assert graphs_captured() == 1


def test_gradients_of_gradients_of_assigned_fields(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    net = Net(lambda f, b: setattr(b, "h", f(b.x).pow(3)) or b.h.sum())
    found = []
    for call in (ORTModule(net), net):
        torch.manual_seed(0)
        batch = Batch(x().requires_grad_())
        call(batch)
        (first,) = torch.autograd.grad(batch.h.sum(), batch.x, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), batch.x))
    torch.testing.assert_close(*found)


def assign_list(f, b):
    b.h = [f(b.x)]
    return b.h[0] * 2


def read_lock(f, b):
    return f(b.x) * (1 + b.lock.locked())


def read_itself(f, b):
    return f(b.again.x)


@pytest.mark.hands_over("what cannot be captured")
@pytest.mark.parametrize(
    ("function", "make", "words"),
    [
        (assign_list, Batch, "forward assigns field 'h' of argument 'batch'"),
        (
            read_lock,
            lambda x: Batch(x, lock=threading.Lock()),
            "batch.lock: got lock, want tensors",
        ),
        (read_itself, lambda x: _with_itself(Batch(x)), "batch.again: got Batch, which refers to"),
    ],
)
def test_refused_by_name(function, make, words, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    ours = ORTModule(Net(function))
    batch = make(x())
    with pytest.warns(FallbackWarning, match=words):
        got = ours(batch)
    torch.testing.assert_close(got, ours.module(batch))


@pytest.mark.hands_over("forward raises")
def test_an_error_of_a_property_is_the_users():
    ours = ORTModule(Net(lambda f, b: f(b.x) * b.broken))
    with pytest.raises(RuntimeError, match="no such thing"):
        ours.module(Batch(x()))
    with pytest.raises(Exception, match="no such thing"):
        ours(Batch(x()))
