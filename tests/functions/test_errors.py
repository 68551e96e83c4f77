# What goes wrong in custom Functions, and what capture cannot learn of them.
from __future__ import annotations

import copy
import traceback

import pytest
import torch
from custom_functions import Net, log
from torch.autograd import Function

import torch_ort
from torch_ort import UserError


class BrokenError(Exception):
    pass


class Failing(Function):
    """Fails when it is told to."""

    where = ""

    @staticmethod
    def forward(ctx, x):
        if Failing.where == "forward":
            raise BrokenError("forward is told to fail")
        log.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if Failing.where == "backward":
            raise BrokenError("backward is told to fail")
        return grad * 2


@pytest.fixture(autouse=True)
def told_nothing():
    Failing.where = ""
    log.clear()
    yield
    Failing.where = ""


def ortmodule(function):
    return torch_ort.ORTModule(Net(function))


@pytest.mark.parametrize("is_first", [False, True])
def test_error_in_forward_reaches_the_user(is_first):
    ours = ortmodule(Failing.apply)
    x = torch.randn(4, 6)
    if is_first:
        with torch.no_grad():
            ours(x)  # another graph of the module
    else:
        ours(x).sum().backward()
    Failing.where = "forward"
    if not is_first:
        with pytest.raises(BrokenError, match="forward is told to fail") as caught:
            ours(x)
        lines = traceback.format_exception(caught.value)
        assert any("test_errors.py" in line and "in forward" in line for line in lines)
    Failing.where = ""
    assert ours(x).shape == (4, 6)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("is_first", [False, True])
def test_error_in_backward_reaches_the_user(is_first):
    ours = ortmodule(Failing.apply)
    x = torch.randn(4, 6)
    if not is_first:
        ours(x).sum().backward()
    loss = ours(x).sum()
    log.clear()
    Failing.where = "backward"
    with pytest.raises(BrokenError, match="backward is told to fail") as caught:
        loss.backward()
    lines = traceback.format_exception(caught.value)
    assert any("test_errors.py" in line and "in backward" in line for line in lines)
    assert log == []  # nothing was run again
    Failing.where = ""
    ours(x).sum().backward()
    assert torch_ort.counters()["fallbacks"] == 0


# What backward gives of two arguments once it is told to, and what is said then.
GRADIENTS = {
    "wrong number": (
        lambda grad: (grad,), lambda grad: (grad, grad),
        r"incorrect number of gradients \(expected 2, got 1\)",
    ),
    "another shape": (
        lambda grad: (grad[:1, :3], grad), lambda grad: (grad, grad),
        r"invalid gradient at index 0 - got \[1, 3\]",
    ),
    "one that capture did not see": (
        lambda grad: (grad, grad), lambda grad: (grad, None),
        "gave a gradient for tensor 1, for which it gave None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_other_gradients_than_those_of_the_capture(name):
    wrong, right, words = GRADIENTS[name]

    class Product(Function):
        @staticmethod
        def forward(ctx, a, b):
            return a * b

        @staticmethod
        def backward(ctx, grad):
            return wrong(grad) if Failing.where else right(grad)

    ours = ortmodule(lambda x: Product.apply(x, x.tanh()))
    ours(torch.randn(4, 6)).sum().backward()
    loss = ours(torch.randn(4, 6)).sum()
    Failing.where = "backward"
    with pytest.raises(RuntimeError, match=words):
        loss.backward()


class Changing(Function):
    """Gives another form of result when it is told to."""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(x.detach().numpy() * 2)
        if Failing.where == "shape":
            return y[:3].clone()
        if Failing.where == "dtype":
            return y.double()
        return (y, y + 1) if Failing.where == "number" else y

    @staticmethod
    def backward(ctx, grad, *others):
        if Failing.where == "None":
            return None
        return torch.from_numpy(grad.numpy() * 2)


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("shape", UserError, r"result 1: got Float\[3, 6\] on cpu, want Float\[4, 6\] on cpu"),
        ("dtype", UserError, r"result 1: got Double\[4, 6\] on cpu, want Float\[4, 6\] on cpu"),
        ("number", RuntimeError, "forward gave 2 results, 1 when its graph was captured"),
    ],
)
def test_form_of_results_is_checked_at_every_call(where, error, words):
    ours = ortmodule(Changing.apply)
    x = torch.randn(4, 6)
    ours(x).sum().backward()
    Failing.where = where
    with pytest.raises(error, match=words):
        ours(x)
    Failing.where = ""
    assert ours(x).shape == (4, 6)


def test_missing_gradient_is_zero():
    ours = ortmodule(Changing.apply)
    ours(torch.randn(4, 6)).sum().backward()
    ours.zero_grad()
    loss = ours(torch.randn(4, 6)).sum()
    Failing.where = "None"
    loss.backward()
    assert ours.before.weight.grad.eq(0).all()


def test_result_that_is_no_tensor_changes():
    class Counted(Function):
        count = 0

        @staticmethod
        def forward(ctx, x):
            return x * 2, Failing.where

        @staticmethod
        def backward(ctx, grad, _):
            return grad

    ours = ortmodule(lambda x: Counted.apply(x)[0])
    ours(torch.randn(4, 6))
    Failing.where = "other"
    with pytest.raises(UserError, match="result 1 of forward is no tensor, and changes"):
        ours(torch.randn(4, 6))


class NeedsMore(Function):
    """Runs on no tensors that are made up."""

    @staticmethod
    def forward(ctx, x):
        if float(x.detach().abs().cpu().numpy().max()) < 5:
            raise ValueError("too small")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


@pytest.mark.hands_over("nothing can capture it")
def test_what_cannot_be_learnt_runs_in_pytorch(monkeypatch):
    x = torch.randn(4, 6)
    strict = ortmodule(lambda y: NeedsMore.apply(y + 50))
    with pytest.raises(
        Exception, match=r"NeedsMore: shapes and dtypes of its results are unknown.*too small"
    ):
        strict(x)
    monkeypatch.delenv("TORCH_ORT_STRICT")
    eager = Net(lambda y: NeedsMore.apply(y + 50))
    ours = torch_ort.ORTModule(copy.deepcopy(eager))
    with pytest.warns(torch_ort.fallback.FallbackWarning, match="infer_shape"):
        result = ours(x)
    assert torch.equal(result, eager(x))


def test_infer_shape_tells_what_cannot_be_learnt(compare):
    class Told(NeedsMore):
        @staticmethod
        def infer_shape(node, tensor_input_shapes, tensor_input_dtypes):
            assert node.func_name.endswith("Told")
            assert tensor_input_dtypes == [1]
            return tensor_input_shapes, tensor_input_dtypes

    compare(
        lambda y: Told.apply(y + 50), lambda step: torch.randn(4 + step, 6), rtol=1e-4, atol=1e-3
    )


def test_sizes_that_do_not_follow_the_arguments_are_fixed(compare):
    class Packed(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            rows = x.detach().cpu().numpy()
            return torch.from_numpy(rows[: rows.shape[0] // 3 + 1].copy()).to(x.device)

        @staticmethod
        def backward(ctx, grad):
            full = torch.zeros(ctx.shape, device=grad.device)
            full[: grad.shape[0]] = grad
            return full

    compare(Packed.apply, lambda step: torch.randn(4 + 6 * (step % 2), 6), graphs=2, steps=4)


def test_flattened_size_of_an_opaque_function(compare):
    class Flat(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return torch.from_numpy(x.detach().cpu().numpy().reshape(-1).copy()).to(x.device)

        @staticmethod
        def backward(ctx, grad):
            return torch.from_numpy(grad.cpu().numpy().reshape(ctx.shape)).to(grad.device)

    compare(Flat.apply, lambda step: torch.randn(4 + step, 6))
