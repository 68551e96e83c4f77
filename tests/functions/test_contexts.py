# Contexts of custom Functions: how long they live, what they hold, hooks, kept graphs, threads.
from __future__ import annotations

import copy
import gc
import threading
import weakref

import custom_functions as F
import pytest
import torch
from custom_functions import Net
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import torch_ort
from torch_ort import _C

alive: weakref.WeakSet = weakref.WeakSet()


class Held:
    """Something that a context owns."""


class Holding(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.held = Held()
        alive.add(ctx.held)
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x


def pair(function):
    eager = Net(function)
    return eager, torch_ort.ORTModule(copy.deepcopy(eager))


def num_alive() -> int:
    gc.collect()
    return len(alive)


@pytest.fixture(autouse=True)
def nothing_alive():
    assert num_alive() == 0
    assert _C.num_python_contexts() == 0


@pytest.fixture
def ours():
    model = pair(Holding.apply)[1]
    model(torch.randn(4, 6)).sum().backward()
    assert num_alive() == 0
    return model


def test_freed_by_backward(ours):
    loss = ours(torch.randn(4, 6)).sum()
    assert num_alive() == 1
    loss.backward()
    assert num_alive() == 0
    assert _C.num_python_contexts() == 0


def test_freed_without_backward(ours):
    loss = ours(torch.randn(4, 6)).sum()
    assert num_alive() == 1
    del loss
    assert num_alive() == 0


def test_two_calls_alive_at_once():
    eager, ours = pair(Holding.apply)
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    for model in (eager, ours):
        first, second = model(a).sum(), model(b).sum()
        second.backward()
        first.backward()
    assert torch.allclose(ours.before.weight.grad, eager.before.weight.grad)
    assert num_alive() == 0


def test_graph_kept_for_a_second_backward():
    eager, ours = pair(lambda x: Holding.apply(F.Squared.apply(x)))
    x = torch.randn(4, 6)
    for model in (eager, ours):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        del loss
    assert torch.allclose(ours.before.weight.grad, eager.before.weight.grad)
    assert num_alive() == 0


def test_graph_and_constants_are_freed_with_the_module():
    class Constant:
        pass

    class Keeping(Function):
        @staticmethod
        def forward(ctx, x, constant):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    constant = Constant()
    watched = weakref.ref(constant)
    ours = pair(lambda x, c=constant: Keeping.apply(x, c))[1]
    ours(torch.randn(4, 6)).sum().backward()
    del constant
    assert watched() is not None
    del ours
    gc.collect()
    assert watched() is None


def test_edit_of_a_saved_parameter_is_noticed():
    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6))

        def forward(self, x):
            return F.SumAndProduct.apply(x, self.weight)[1]

    x = torch.randn(6, requires_grad=True)
    for model in (Product(), torch_ort.ORTModule(Product())):
        loss = model(x).sum()
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_edit_of_a_saved_output_is_noticed():
    for model in (Last(), torch_ort.ORTModule(Last())):
        y = model(torch.randn(4, 6))
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class Last(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return F.Exp.apply(self.linear(x))


@pytest.mark.parametrize("hooks", ["save_on_cpu", "clone"])
def test_saved_tensor_hooks(hooks):
    eager, ours = pair(lambda x: F.Squared.apply(F.Stashing.apply(x)))
    x = torch.randn(4, 6)

    def context():
        if hooks == "save_on_cpu":
            return save_on_cpu()
        return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)

    for _ in range(2):
        for model in (eager, ours):
            with context():
                loss = model(x).sum()
            loss.backward()
    assert torch.allclose(ours.before.weight.grad, eager.before.weight.grad)
    assert torch_ort.counters()["fallbacks"] == 0


def test_under_hooks_contexts_end_with_their_call():
    _, ours = pair(lambda x: F.Squared.apply(F.Stashing.apply(x)))
    with saved_tensors_hooks(torch.clone, lambda t: t):
        for _ in range(2):
            loss = ours(torch.randn(4, 6)).sum()
        assert _C.num_python_contexts() > 0
        del loss
    gc.collect()
    assert _C.num_python_contexts() == 0


def part(x):
    return F.Squared.apply(F.NumpyTanh.apply(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_of_a_checkpoint(compare, use_reentrant):
    compare(lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=use_reentrant))


@pytest.mark.hands_over("nothing can capture it")
def test_checkpoint_of_deepspeed_is_refused(monkeypatch):
    class CheckpointFunction(F.Squared):
        __module__ = "deepspeed.runtime.activation_checkpointing.checkpointing"

    CheckpointFunction.__qualname__ = "CheckpointFunction"
    ours = pair(CheckpointFunction.apply)[1]
    with pytest.raises(Exception, match=r"CheckpointFunction: .*captured and obeyed.*Hierarchical"):
        ours(torch.randn(4, 6))


def test_module_inside_of_a_checkpoint():
    eager, ours = pair(lambda x: Holding.apply(F.Squared.apply(x)))
    x = torch.randn(4, 6, requires_grad=True)
    for _ in range(2):
        for model in (eager, ours):
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert torch.allclose(ours.before.weight.grad, eager.before.weight.grad)
    assert num_alive() == 0


def test_threads():
    eager, ours = pair(lambda x: F.NumpyTanh.apply(Holding.apply(x)))
    ours(torch.randn(4, 6)).sum().backward()
    ours.zero_grad()
    inputs = [torch.randn(4, 6) for _ in range(12)]
    results: list[torch.Tensor] = []

    def work(part):
        for x in part:
            results.append(torch.autograd.grad(ours(x).sum(), ours.before.weight)[0])

    threads = [threading.Thread(target=work, args=(inputs[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x in inputs:
        eager(x).sum().backward()
    assert torch.allclose(sum(results), eager.before.weight.grad, atol=1e-5)
    assert num_alive() == 0


def test_gradients_do_not_share_memory():
    class Both(Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a)
            return a + b

        @staticmethod
        def backward(ctx, grad):
            return grad, grad

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.randn(6))
            self.b = torch.nn.Parameter(torch.randn(6))

        def forward(self):
            return Both.apply(self.a, self.b)

    ours = torch_ort.ORTModule(Sum())
    for _ in range(2):
        ours().sum().backward()
    assert ours.a.grad.data_ptr() != ours.b.grad.data_ptr()
    assert ours.a.grad.eq(2).all()
    assert ours.b.grad.eq(2).all()
