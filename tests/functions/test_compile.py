# Functions wrapped by torch_ort.python_op in code that torch.compile traces, and explain's words
# about those that are not.
from __future__ import annotations

import copy

import custom_functions as F
import pytest
import torch
from custom_functions import log
from models import module_with
from torch import nn

import torch_ort
from torch_ort import UserError, python_op

tanh = python_op(F.NumpyTanh)


@python_op
class NumpyScaled(torch.autograd.Function):
    """Takes a number as well."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return torch.from_numpy(x.detach().cpu().numpy() * factor).to(x.device)

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.cpu().numpy() * ctx.factor * 3).to(grad.device), None


@pytest.fixture
def backend() -> str:
    return "ort"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(NumpyScaled(tanh(self.first(x)), 0.5))


def test_numpy_function_in_a_full_graph(compare_training, assert_python_steps):
    compare_training(Model, lambda step: torch.randn(4, 6))
    assert_python_steps(graphs=1)


def test_changing_sizes(compare_training, assert_python_steps):
    compare_training(Model, lambda step: torch.randn(4 + step, 6), steps=4)
    assert_python_steps(graphs=2)  # torch captures sizes that change once more


def test_several_results(compare_training, assert_python_steps):
    halves = python_op(F.Halves)
    both = python_op(F.SumAndProduct)

    def function(x):
        half, largest = halves(x)
        total, product = both(half, x)
        return total, product, largest

    compare_training(lambda: function, lambda step: torch.randn(4, 6, requires_grad=True))
    assert_python_steps(graphs=1)


# AOTAutograd gives zeros in place of gradients that do not come.
@pytest.mark.parametrize("maker", ["recorder"], indirect=True)
@pytest.mark.parametrize("materialize", [True, False])
def test_last_result_without_a_gradient(compiled, assert_python_steps, materialize):
    parts = python_op(F.ThreeParts)

    def loss_and_last(x):
        first, second, last = parts(x, materialize, False)
        return first.square().sum() + second.sum(), last

    engine = compiled(loss_and_last, fullgraph=True)
    for _ in range(2):
        x, same = (torch.ones(4, 6, requires_grad=True) for _ in range(2))
        engine(x)[0].backward()
        loss_and_last(same)[0].backward()
        torch.testing.assert_close(x.grad, same.grad)
    assert_python_steps(graphs=1)


def test_order_of_effects(compiled):
    logging = python_op(F.Logging)

    def function(x):
        logging(x, "unread")
        return logging(logging(x, "a"), "b").sum()

    x = torch.randn(4, requires_grad=True)
    call = compiled(function)
    call(x).backward()
    log.clear()
    call(x).backward()
    assert log == ["forward unread", "forward a", "forward b", "backward b", "backward a"]


def test_outside_of_torch_compile():
    x = torch.randn(4, 6, requires_grad=True)
    assert torch.allclose(tanh(x), x.tanh())
    assert torch.allclose(tanh.apply(x), x.tanh())
    assert repr(tanh) == "torch_ort.python_op(custom_functions.NumpyTanh)"
    assert python_op(F.NumpyTanh) is tanh


def test_in_an_ortmodule(assert_python_steps):
    torch_ort.ORTModule(Model())(torch.randn(4, 6)).sum().backward()
    assert_python_steps(steps=4)


@pytest.mark.hands_over("the graph is refused")
def test_graph_that_runs_in_eager(monkeypatch):
    monkeypatch.delenv("TORCH_ORT_STRICT")

    def fail(*args, **kwargs):
        raise torch_ort.Unsupported("told to fail")

    monkeypatch.setattr("torch_ort.capture.graphs.read_joint", fail)
    model = Model()
    x = torch.randn(4, 6)
    with pytest.warns(UserWarning, match="told to fail"):
        result = torch.compile(model, backend="ort", fullgraph=True)(x)
    assert torch.equal(result, model(x))
    result.sum().backward()


def test_with_another_backend(compiled):
    model, x = Model(), torch.randn(4, 6)
    other = torch.compile(model, backend="aot_eager", fullgraph=True)
    other(x).sum().backward()
    want = model.first.weight.grad.clone()
    model.zero_grad()
    compiled(Model())(x)  # a capture in between
    other(x).sum().backward()
    assert torch.allclose(model.first.weight.grad, want)


def test_anything_but_a_function_is_refused():
    for wrong in (torch.tanh, nn.Linear, F.Squared.apply):
        with pytest.raises(UserError, match="want a class derived from torch"):
            python_op(wrong)


def test_explain_names_functions_that_break_the_graph():
    report = torch_ort.explain(
        module_with(
            lambda self, x: F.MemoryNegated.apply(self.linear(x)).cos(), linear=nn.Linear(6, 6)
        ),
        torch.randn(4, 6),
    )
    assert report.functions_outside == {"custom_functions.MemoryNegated": 1}
    text = str(report)
    assert "custom functions outside of the graphs: custom_functions.MemoryNegated 1" in text
    assert "torch_ort.python_op(TheFunction)" in text


def test_explain_is_silent_about_functions_in_the_graph():
    report = torch_ort.explain(Model(), torch.randn(4, 6))
    assert not report.functions_outside
    assert report.graphs[0].nodes["com.microsoft.PythonOp"] == 2
    assert report.graphs[0].nodes["com.microsoft.PythonOpGrad"] == 2
    assert "custom functions" not in str(report)


class Factor:
    """An object that Dynamo cannot put into a graph."""

    def __init__(self, value):
        self.value = value


@python_op
class ScaledByObject(torch.autograd.Function):
    """Takes an object of the user's."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return torch.from_numpy(x.detach().cpu().numpy() * factor.value).to(x.device)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor.value, None


class WithObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.factor = Factor(0.5)

    def forward(self, x):
        return self.second(ScaledByObject(torch.tanh(self.first(x)), self.factor))


@pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
def test_an_object_as_argument_breaks_the_graph(compare_training):
    compare_training(
        WithObject, lambda step: torch.randn(4, 6), compile_settings={"fullgraph": False}
    )
    counters = torch_ort.counters()
    assert counters["graphs_captured"] > 1  # before and after the call
    assert counters["steps_python"] == 0


def test_an_object_as_argument_in_a_full_graph_raises(compiled):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"UserDefinedObjectVariable\(Factor\)"):
        compiled(WithObject())(torch.randn(4, 6))


def test_objects_in_an_ortmodule_are_read_at_every_call(assert_python_steps):
    eager = WithObject()
    ours = torch_ort.ORTModule(copy.deepcopy(eager))
    for value in (0.5, 2.0):
        eager.factor.value = ours.module.factor.value = value
        x = torch.randn(4, 6)
        for model in (eager, ours):
            model.zero_grad()
            model(x).pow(2).sum().backward()
        for got, want in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
    assert_python_steps(graphs=1)
