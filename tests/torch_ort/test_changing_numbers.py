"""Numbers of a program that differ from step to step: temperatures, weights of losses, counters.

A graph is captured twice, at the first step and after the first change, and serves all others.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort
from tests.roads import ROADS

pytestmark = pytest.mark.ort_only

STEPS = 6


class Annealed(nn.Module):
    """Two floats and two integers that the loop changes."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.hot, self.weight, self.step, self.count = 1.0, 0.1, 0, 3

    def forward(self, x):
        return self.function(self, self.linear(x), x)


class Counted(Annealed):
    """Counts its calls, and cools down, in forward."""

    def forward(self, x):
        self.step += 1
        self.hot = max(self.hot * 0.9, 0.5)
        return super().forward(x)


def change(model: Annealed, step: int) -> None:
    model.hot, model.weight = 1.0 + step / 10, 0.01 * step + 0.01
    model.step, model.count = step, 2 + step


def train(model, call, changes=change, dtype=torch.float32) -> list[torch.Tensor]:
    """Train, and give losses and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen = []
    for step in range(STEPS):
        changes(model, step)
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = call(torch.randn(3, 4, dtype=dtype))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return seen


def compare(road, model, changes=change, dtype=torch.float32) -> None:
    eager = copy.deepcopy(model)
    got = train(model, ROADS[road](model), changes, dtype)
    want = train(eager, eager, changes, dtype)
    torch.testing.assert_close(got, want)
    for name in ("hot", "weight", "step", "count"):
        now, right = getattr(model, name), getattr(eager, name)
        assert type(now) is type(right)
        assert now == pytest.approx(right, rel=1e-12)


# Each gives a loss of a model, of what its layer gives, and of the input.
IN_ONE_GRAPH = {
    "quotient": lambda m, y, x: (y / m.hot).softmax(-1).square().sum(),
    "divided": lambda m, y, x: (m.hot / (y.exp() + 1)).sum(),
    "subtracted from": lambda m, y, x: (m.hot - y).square().sum(),
    "weights that are computed": lambda m, y, x: (
        (1 - m.weight) * y.square().mean() + m.weight * y.abs().sum()
    ),
    "of numbers alone": lambda m, y, x: y.sum() * (m.hot**2 - 3 * abs(-m.weight) + m.step // 2),
    "a warm-up": lambda m, y, x: m.step / 5 * y.square().mean(),
    "clamp": lambda m, y, x: y.clamp(-m.weight, m.hot).square().sum(),
    "clamp on one side": lambda m, y, x: y.clamp(min=m.weight).square().sum(),
    "comparison": lambda m, y, x: (y * (y > m.weight)).sum(),
    "power of a number": lambda m, y, x: y.sum() * (m.hot**0.5),
    "rounded quotient": lambda m, y, x: y.sum() * (m.hot // 0.1 + m.count // 0.1 + 1.5 // m.hot),
    "an integer": lambda m, y, x: (y * m.count).sum() + m.count,
    "quotient of an integer": lambda m, y, x: (y / m.count).square().sum(),
    "0-d tensors": lambda m, y, x: y.sum() / m.count + y.mean() * m.hot,
    "a tensor of one number": lambda m, y, x: (y * torch.full((3, 4), m.weight)).square().sum(),
    "factor of a sum": lambda m, y, x: torch.add(y, x, alpha=m.weight).square().sum(),
    "masked": lambda m, y, x: y.masked_fill(x > 0, m.weight).square().sum(),
    "chosen": lambda m, y, x: torch.where(x > 0, y, m.weight).square().sum(),
    "integers in tensors": lambda m, y, x: ((x > 0).long() * m.weight).sum() * y.sum(),
    "short floats": lambda m, y, x: (m.weight * y.bfloat16()).float().square().sum(),
    "a truth that stays": lambda m, y, x: y.square().sum() * (m.hot if m.hot > 0.5 else 1.0),
}
# What takes a number for a constant has a graph for each; numbers are right still.
IN_MANY = {
    "slope": lambda m, y, x: F.leaky_relu(y, m.weight).square().sum(),
    "exponent": lambda m, y, x: (y.abs() + 1).pow(m.hot).sum(),
    "size": lambda m, y, x: (y * torch.ones(m.count, 3, 4)).square().sum(),
    "smoothing": lambda m, y, x: F.cross_entropy(
        y, torch.tensor([0, 1, 2]), label_smoothing=m.weight
    ),
    "of the math module": lambda m, y, x: (y * math.cos(m.hot)).sum(),
    "a base": lambda m, y, x: ((1 + m.hot) ** y).sum(),
    # PyTorch's symbols would round these quotients down, and multiply the constants first.
    "a negative quotient": lambda m, y, x: y.sum() * int(-m.count / 2) + int((m.step - 9) / 4),
    "an order of factors": lambda m, y, x: y.sum() * int(m.weight * 29 * 100),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_in_one_graph(road, name):
    torch.manual_seed(0)
    compare(road, Annealed(IN_ONE_GRAPH[name]))
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 2
    assert counters["forward_runs"] == counters["backward_runs"] == STEPS


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", IN_MANY)
@pytest.mark.hands_over("some formulas of PyTorch take no symbolic numbers")
def test_in_many_graphs(road, name):
    torch.manual_seed(0)
    compare(road, Annealed(IN_MANY[name]))
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["forward_runs"] == STEPS


class Scaled(torch.autograd.Function):
    """Wants floats of Python, of which one is in a list."""

    @staticmethod
    def forward(ctx, x, scale, rest):
        assert type(scale) is type(rest[1]) is float
        ctx.save_for_backward(rest[0])
        ctx.scale, ctx.shift = scale, rest[1]
        return x * math.sin(scale) + rest[0] * math.cos(rest[1])

    @staticmethod
    def backward(ctx, gradient):
        (other,) = ctx.saved_tensors
        assert type(ctx.scale) is type(ctx.shift) is float
        return gradient * math.exp(-ctx.scale) + other * ctx.shift, None, None


class Inferred(Scaled):
    """Says what it returns, as Functions for ONNX Runtime Training do."""

    @staticmethod
    def infer_shape(node, tensor_input_shapes, tensor_input_dtypes):
        assert tensor_input_shapes == [[3, 4], [3, 4]]
        return tensor_input_shapes[:1], tensor_input_dtypes[:1]


class Reading(Scaled):
    """Reads a number in a tensor, so that it is tried on made-up data."""

    @staticmethod
    def forward(ctx, x, scale, rest):
        assert x.sum().item() < 1e6
        return Scaled.forward(ctx, x, scale, rest)


@pytest.mark.parametrize("function", [Scaled, Inferred, Reading])
def test_floats_that_a_function_takes_differ_between_calls_of_one_graph(function):
    def loss(m, y, x):
        first = function.apply(y, m.hot, [x.detach(), m.weight * 2])
        return first.square().sum() + function.apply(y, m.weight, (x.detach(), m.hot)).sum()

    torch.manual_seed(0)
    compare("ortmodule", Annealed(loss))
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 2
    assert counters["forward_runs"] == counters["backward_runs"] == STEPS
    assert counters["steps_python"] > 0


@pytest.mark.parametrize("road", ROADS)
def test_a_branch_on_a_number_has_a_graph_for_each_side(road):
    torch.manual_seed(0)
    compare(road, Annealed(lambda m, y, x: y.sum() * (m.hot if m.hot > 1.25 else 2.0)))
    assert torch_ort.counters()["graphs_captured"] == 3


@pytest.mark.parametrize("road", ROADS)
def test_counters_of_forward_count(road):
    torch.manual_seed(0)
    compare(road, Counted(lambda m, y, x: y.square().sum() * m.hot + m.step), lambda m, step: None)
    assert torch_ort.counters()["forward_runs"] == STEPS
    assert torch_ort.counters()["graphs_captured"] <= 3


# What Python raises, or computes without bounds, and tensors do not.
BEYOND_TENSORS = {
    "quotient by 0": (lambda m, y: y * (1 / m.hot), 0.0),
    "rest of a quotient by 0": (lambda m, y: y * (5 % m.count), 0),
    "whole quotient by 0": (lambda m, y: y * (5 // m.count), 0),
    "0 to a negative power": (lambda m, y: y * m.hot**-1.0, 0.0),
    "root": (lambda m, y: y * math.sqrt(m.hot), -1.0),
    "logarithm": (lambda m, y: y * math.log(m.hot), 0.0),
    "exponential": (lambda m, y: y * math.exp(m.hot), 1000.0),
}
BEYOND_64_BITS = {
    "product": (lambda m, y: y * (m.count * m.count), 2**40),
    "power": (lambda m, y: y * m.count**3, 2**30),
    "a large power that is small again": (lambda m, y: y * (m.count**4 % 7), 2**20),
    "a large float": (lambda m, y: y * m.hot**400.0, 10.0),
}


@pytest.mark.hands_over("a trace of PyTorch's raises what forward raises")
@pytest.mark.parametrize("name", [*BEYOND_TENSORS, *BEYOND_64_BITS])
@pytest.mark.parametrize("road", ROADS)
def test_what_python_raises_is_raised(road, name, monkeypatch):
    if road == "compile" and name in BEYOND_64_BITS:
        pytest.skip("Dynamo's own symbols have no bounds to guard")
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    function, last = (BEYOND_TENSORS | BEYOND_64_BITS)[name]
    model = Annealed(lambda m, y, x: function(m, y))
    call = ROADS[road](model)
    x = torch.randn(3, 4)
    for hot, count in ((1.0, 1), (1.25, 2), (1.5, 3)):
        model.hot, model.count = hot, count
        torch.testing.assert_close(call(x), model(x))
    model.hot, model.count = float(last), int(last)
    try:
        want = model(x)
    except (ArithmeticError, ValueError, RuntimeError) as error:
        with pytest.raises(type(error)):
            call(x)
    else:
        torch.testing.assert_close(call(x), want)
    model.hot, model.count = 1.75, 4
    torch.testing.assert_close(call(x), model(x))


def weighted_where_possible(m, y):
    try:
        return y * (1 / m.hot)
    except ZeroDivisionError:
        return y.square()


CAUGHT = {
    "by another branch": weighted_where_possible,
    "by a complex number": lambda m, y: y * abs((m.hot - 1) ** 0.5),
}


@pytest.mark.hands_over("a complex number is computed")
@pytest.mark.parametrize("name", CAUGHT)
@pytest.mark.parametrize("road", ROADS)
def test_what_python_raises_may_be_caught(road, name):
    model = Annealed(lambda m, y, x: CAUGHT[name](m, y))
    call = ROADS[road](model)
    x = torch.randn(3, 4)
    for hot in (1.0, 1.25, 1.5, 0.0, 1.75, 0.0):
        model.hot = hot
        torch.testing.assert_close(call(x), model(x))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("road", ROADS)
def test_quotients_are_rounded_as_python_rounds_them(road):
    """1.0 / 0.1 is 10.0, and 1.0 // 0.1 is 9.0."""
    model = Annealed(lambda m, y, x: y * (m.hot // 0.1) + m.count // 0.1 - 5.0 // m.hot)
    call = ROADS[road](model)
    x = torch.randn(3, 4)
    for i, hot in enumerate((2.0, 1.0, 0.5, 0.6, 0.9, -1.0, 1e17, 5.0, 0.1)):
        model.hot, model.count = hot, i
        torch.testing.assert_close(call(x), model(x))
    assert torch_ort.counters()["graphs_captured"] <= 3


@pytest.mark.hands_over("sizes of a recording have no absolute value")
@pytest.mark.parametrize("road", ROADS)
def test_absolute_value_of_an_integer(road):
    model = Annealed(lambda m, y, x: (y * abs(m.count)).sum())
    call = ROADS[road](model)
    for count in (1, -2, 3, -4, 5):
        model.count = count
        x = torch.randn(3, 4)
        torch.testing.assert_close(call(x), model(x))
    assert torch_ort.counters()["forward_runs"] == 5


def test_bits_of_integers():
    model = Annealed(
        lambda m, y, x: y * ((m.count & 6) + (m.count | 1) + (m.count ^ 2) + (m.count << 1))
    )
    ours = torch_ort.ORTModule(model)
    for count in (1, 2, 3, 7):
        model.count = count
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), model(x))
    assert torch_ort.counters()["recordings_handed_over"] == 0


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_of_doubles(road, name):
    torch.manual_seed(0)
    model = Annealed(IN_ONE_GRAPH[name]).double()
    eager = copy.deepcopy(model)
    got = train(model, ROADS[road](model), dtype=torch.float64)
    exact = 1e-2 if name == "short floats" else 1e-9
    torch.testing.assert_close(
        got, train(eager, eager, dtype=torch.float64), rtol=exact, atol=exact
    )


def test_zeros_of_both_signs_and_numbers_that_are_none():
    model = Annealed(lambda m, y, x: y.abs().sum() * math.copysign(1.0, m.hot) + m.weight * 0)
    ours = torch_ort.ORTModule(model)
    for hot, weight in ((1.0, 0.0), (0.0, 1.0), (-0.0, math.inf), (0.0, math.nan), (-0.0, -1e30)):
        model.hot, model.weight = hot, weight
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), model(x), equal_nan=True)


def test_in_an_object_and_a_global(monkeypatch):
    class Config:
        rate = 0.5

        def __init__(self) -> None:
            self.scale = 1.0

    config = Config()
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    model = Annealed(lambda m, y, x: (y * config.scale).sum() * FACTOR)  # noqa: F821
    ours = torch_ort.ORTModule(model)
    for step in range(STEPS):
        config.scale, globals()["FACTOR"] = 1.0 + step, 2.0 * step
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), model(x))
    assert torch_ort.counters()["graphs_captured"] == 2


def test_assigned_numbers_of_two_calls_alive_at_once():
    model = Counted(lambda m, y, x: y.square().sum() * m.step)
    eager = copy.deepcopy(model)
    ours = torch_ort.ORTModule(model)
    x = torch.randn(3, 4)
    for _ in range(2):
        first, second = ours(x), ours(x)
        want = eager(x), eager(x)
        torch.testing.assert_close((first, second), want)
        (first + second).backward()
        sum(want).backward()
    torch.testing.assert_close(model.linear.weight.grad, eager.linear.weight.grad)
    assert (model.step, model.hot) == (eager.step, eager.hot)


@pytest.mark.hands_over("a symbolic float takes no format")
def test_text_of_a_number_is_that_of_its_call():
    model = Annealed(lambda m, y, x: (y * len(f"{m.step} {m.hot:.3f}")).sum())
    ours = torch_ort.ORTModule(model)
    for step, hot in ((1, 0.5), (2, 1.5), (10, 2.5), (100, 10.25)):
        model.step, model.hot = step, hot
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), model(x))


def test_gradients_of_gradients_see_the_numbers_of_their_call(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = Annealed(lambda m, y, x: y.pow(3).sum() * m.hot)
    ours = torch_ort.ORTModule(model)
    for hot in (1.0, 2.0, 3.0):
        model.hot = hot
        x = torch.randn(3, 4, requires_grad=True)
        (got,) = torch.autograd.grad(ours(x), x, create_graph=True)
        (want,) = torch.autograd.grad(model(x), x, create_graph=True)
        found = torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)
        torch.testing.assert_close(*found)


def test_an_integer_beyond_64_bits_is_left_to_pytorch():
    model = Annealed(lambda m, y, x: y.sum() * float(m.count))
    ours = torch_ort.ORTModule(model)
    for count in (1, 2, 2**70):
        model.count = count
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), model(x))
