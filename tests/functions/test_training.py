# Modules with custom Functions, trained here and in eager PyTorch: outputs, losses, gradients and
# parameters of several steps are the same, and everything runs in one graph.
from __future__ import annotations

import copy

import custom_functions as F
import numpy as np
import pytest
import torch
from custom_functions import log

import torch_ort
from torch_ort import _C
from torch_ort.pytorch.versions import is_within


@pytest.fixture(autouse=True)
def empty_log():
    log.clear()


CASES = {
    "scalar": lambda x: F.Scaled.apply(x, 0.5),
    "saved input": F.Squared.apply,
    "saved output": F.Exp.apply,
    "saved output used again": lambda x: F.Exp.apply(x).tanh().relu(),
    "numpy": F.NumpyTanh.apply,
    "numpy in backward": F.NumpyBackward.apply,
    "addresses": F.MemoryNegated.apply,
    "addresses of a copy": F.CopyNegated.apply,
    "two outputs": lambda x: F.SumAndProduct.apply(x, x.tanh()),
    "integer output": F.Halves.apply,
    "marked output": F.FixedCopy.apply,
    "one of two outputs": lambda x: F.SumAndProduct.apply(x, x.tanh())[1],
    "same argument twice": lambda x: F.SumAndProduct.apply(x, x),
    "None gradient": lambda x: F.IgnoresSecond.apply(x, x.tanh()),
    "written argument": lambda x: F.AddsOne.apply(x * 2),
    "given back": F.Identity.apply,
    "given back and edited": lambda x: F.Identity.apply(x.tanh()).mul(2),
    "setup_context": lambda x: F.Split.apply(x, 2),
    "setup_context, default": lambda x: F.Split.apply(x),
    "functions inside": F.Outer.apply,
    "once_differentiable": F.Once.apply,
    "kept in other ways": F.Stashing.apply,
    "straight through": F.Straight.apply,
    "nested calls": lambda x: F.Squared.apply(F.Exp.apply(F.Scaled.apply(x, 0.1))),
    "used often": lambda x: sum(F.Squared.apply(x * i) for i in (0.1, 0.2, 0.3)),
    "containers": lambda x: F.Nested.apply(x, [x.detach() * 2, {"weight": x.tanh()}]),
    "strides of a result": F.Transposed.apply,
    "strides of a numpy result": F.NumpyTransposed.apply,
    "argument with strides": lambda x: F.Squared.apply(x.t()).t(),
    "expanded argument": lambda x: F.Squared.apply(x[:1].expand(4, -1)),
    "sliced argument": lambda x: F.Stashing.apply(x[1:3, ::2]),
    "empty argument": lambda x: F.Squared.apply(x[:0]).sum() + x,
    "zero dims": lambda x: F.Squared.apply(x.mean()) + x,
    "size as argument": lambda x: F.Scaled.apply(x, x.shape[0]) / 100,
    "rows chosen by data": lambda x: F.Squared.apply(x[x.detach().sum(1) > 0]).sum(0) + x,
    "rows chosen by data, numpy": lambda x: F.NumpyTanh.apply(x[x.detach()[:, 0] > 0]).sum(0) + x,
    "double": lambda x: F.Squared.apply(x.double()).float(),
}
if is_within("2.13", ""):  # apply() takes keyword arguments
    CASES["setup_context, named"] = lambda x: F.Split.apply(x, power=2)


# Unbacked sizes are left to AOTAutograd.
@pytest.mark.parametrize("name", CASES)
def test_like_eager(compare, name):
    compare(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_changing_sizes_in_one_graph(compare, name):
    compare(CASES[name], lambda step: torch.randn(8 + step, 6) / 4, steps=4)


def test_arguments_that_are_no_tensors(compare):
    options = {"power": 2}

    def function(x):
        first, nothing, text = F.Mixed.apply(x, True, 2, 0.25, (1, 2), "name", options, None)
        assert (nothing, text) == (None, "text")
        return first

    compare(function)


def test_written_argument_is_seen_by_later_readers(compare):
    def function(x):
        y = x * 2
        z = y.tanh()
        F.AddsOne.apply(y)
        return y + z

    compare(function)


def test_bfloat16(compare):
    compare(lambda x: F.Stashing.apply(x.bfloat16()).float() + F.Squared.apply(x.bfloat16()))


def test_parameters_as_arguments(compare_training, assert_python_steps):
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6))
            self.fixed = torch.nn.Parameter(torch.randn(6), requires_grad=False)

        def forward(self, x):
            return F.Wanted.apply(x, self.weight, self.fixed)

    compare_training(Linear, lambda step: torch.randn(4, 6))
    assert set(log) == {"(False, True, False)"}
    compare_training(Linear, lambda step: torch.randn(4, 6, requires_grad=True))
    assert "(True, True, False)" in log
    assert_python_steps(graphs=2)


def test_gradients_of_unused_outputs(compare):
    compare(lambda x: F.NoMaterialized.apply(x)[1])
    assert set(log) == {"True False"}
    log.clear()
    compare(lambda x: F.Materialized.apply(x)[1], graphs=2)
    assert set(log) == {"False False"}


# AOTAutograd gives zeros in place of gradients that do not come.
@pytest.mark.parametrize("maker", ["recorder"], indirect=True)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("is_last_fixed", [True, False])
def test_results_without_a_gradient(is_last_fixed, materialize, used, assert_python_steps):
    """Absent first, in the middle and last, of a result that could have one or cannot."""
    if is_last_fixed:
        used = [i for i in used if i != 2] or [0]

    def losses_and_results(x):
        results = F.ThreeParts.apply(x, materialize, is_last_fixed)
        return sum(results[i].square().mean() for i in used), *results

    model = F.Net(losses_and_results)
    eager = copy.deepcopy(model)
    wrapped = torch_ort.ORTModule(model)
    for _ in range(2):  # the second call expects the gradients of the first
        x = torch.randn(4, 6)
        for each in (wrapped, eager):
            each.zero_grad()
            each(x)[0].backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert_python_steps(graphs=1)


@pytest.mark.parametrize("maker", ["recorder"], indirect=True)
def test_function_that_gives_no_gradient_is_not_asked_without_one(assert_python_steps):
    def two(x):
        return x.square().sum(), F.NoGradient.apply(x).sum()

    model = F.Net(two)
    wrapped = torch_ort.ORTModule(model)
    wrapped(torch.randn(4, 6))
    for result, asked in ((0, 0), (0, 0), (1, 1)):
        log.clear()
        model.zero_grad()
        (wrapped(torch.randn(4, 6))[result] + model.scale.sum()).backward()
        assert len(log) == asked
    assert_python_steps(graphs=1)


def test_under_no_grad_and_eval(assert_python_steps):
    eager = F.Net(F.NumpyTanh.apply).eval()
    ours = torch_ort.ORTModule(copy.deepcopy(eager))
    x = torch.randn(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), eager(x))
    assert_python_steps(1)
    assert _C.num_python_contexts() == 0
    loss, want = ours(x).sum(), eager(x).sum()
    loss.backward()
    want.backward()
    assert torch.allclose(ours.before.weight.grad, eager.before.weight.grad)


def test_no_grad_inside_of_forward(compare):
    def function(x):
        with torch.no_grad():
            fixed = F.Squared.apply(x)
        return x + fixed

    compare(function)
    assert _C.num_python_contexts() == 0


def test_order_of_effects(compare):
    def function(x):
        y = F.Logging.apply(x, "a")
        F.Logging.apply(x, "unread")
        z = F.Logging.apply(x, "b")
        return F.Logging.apply(y + z, "c")

    log.clear()
    compare(function, steps=1)
    steps = log[: log.index("backward a") + 1]
    eager = [
        "forward a", "forward unread", "forward b", "forward c",
        "backward c", "backward b", "backward a",
    ]  # fmt: skip
    assert steps == eager
    assert log[-len(eager) :] == eager


def test_equal_calls_are_not_merged(compare):
    compare(lambda x: F.Logging.apply(x, "same") + F.Logging.apply(x, "same"), steps=1)
    assert log[-4:] == ["forward same"] * 2 + ["backward same"] * 2


class Counting(torch.autograd.Function):
    """Updates statistics that are given to it, without mark_dirty, as hand-written norms do."""

    @staticmethod
    def forward(ctx, x, mean):
        mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - mean

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def test_statistics_in_a_buffer(compare_training, assert_python_steps):
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            return Counting.apply(self.linear(x), self.mean)

    compare_training(Norm, lambda step: torch.randn(4, 6))
    assert_python_steps()


def test_written_input_of_the_module(compare_training, assert_python_steps):
    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(6))

        def forward(self, x):
            return F.AddsOne.apply(x) * self.weight

    compare_training(Writing, lambda step: torch.randn(4, 6))
    assert_python_steps()


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.noise = torch.rand_like(x)
        ctx.numbers = np.random.rand(6).astype("float32")
        return x * ctx.noise + torch.from_numpy(ctx.numbers).to(x.device)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.noise


def test_random_numbers_in_their_order(compare):
    states = [np.random.get_state()]

    def before(model, step):
        if step == 0:
            np.random.set_state(states[0])

    compare(
        lambda x: torch.dropout(Noise.apply(torch.dropout(x, 0.5, True)), 0.5, True),
        before_step=before,
    )


def test_autocast(compare, device):
    kinds = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            result = x @ y
            kinds.append(result.dtype)
            return result

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad.float() @ y.t().float(), x.t().float() @ grad.float()

    def function(x):
        with torch.autocast(device, torch.bfloat16):
            return Product.apply(x.float(), x.float().t()).float()

    compare(function)
    assert set(kinds) == {torch.bfloat16}


def test_inference_mode(assert_python_steps):
    eager = F.Net(F.Stashing.apply)
    ours = torch_ort.ORTModule(copy.deepcopy(eager))
    x = torch.randn(4, 6)
    with torch.inference_mode():
        assert torch.allclose(ours(x), eager(x))
    assert_python_steps(1)


def test_function_without_tensors_among_its_arguments(compare, device):
    class Grid(torch.autograd.Function):
        @staticmethod
        def forward(ctx, count):
            return torch.arange(float(count), device=device)

        @staticmethod
        def backward(ctx, grad):
            return None

    compare(lambda x: x + Grid.apply(6))
