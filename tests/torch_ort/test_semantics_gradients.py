# What autograd asks of a compiled module beyond a plain loss.backward().
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from models import module_with
from torch import nn

pytestmark = pytest.mark.both_roads


@pytest.fixture
def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


@pytest.fixture
def x(device: str) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 6).to(device).requires_grad_()


def gradients(module: nn.Module) -> list:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


class TestWhichInputsGetGradients:
    def test_inputs_that_require_grad(self, compare_training):
        compare_training(
            lambda: nn.Bilinear(4, 5, 3),
            lambda step: (
                torch.randn(2, 4, requires_grad=True),
                torch.randn(2, 5, requires_grad=True),
            ),
        )

    def test_input_requirement_toggled_between_steps(self, compare_training, graphs_captured):
        compare_training(
            lambda: nn.Linear(4, 3),
            lambda step: torch.randn(2, 4).requires_grad_(step % 2 == 1),
            steps=4,
        )
        assert graphs_captured() == 2

    def test_only_some_inputs_require_grad(self, compare_training):
        compare_training(
            lambda: lambda a, b, c: (a * b + c.float()).tanh(),
            lambda step: (torch.randn(3), torch.randn(3, requires_grad=True), torch.arange(3)),
        )

    def test_inputs_that_are_not_leaves(self, compare_training):
        compare_training(
            lambda: nn.Linear(4, 3), lambda step: torch.randn(2, 4, requires_grad=True) * 2
        )

    def test_gradient_of_an_input_behind_a_detach_is_none(self, compare_training):
        want, _ = compare_training(
            lambda: lambda a, b: a * b.detach(),
            lambda step: (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)),
        )
        assert want.records[0]["gradient of input 1"] is None

    def test_gradient_stopped_inside(self, compare_training):
        def function(a):
            with torch.no_grad():
                scale = a.abs().mean()
            return a / scale

        compare_training(lambda: function, lambda step: torch.randn(3, 4, requires_grad=True))

    def test_outputs_that_cannot_have_gradients(self, compare_training):
        compare_training(
            lambda: lambda a: (a.argmax(-1), a > 0, a.exp(), a.sort(-1)),
            lambda step: torch.randn(3, 4, requires_grad=True),
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
    def test_zeros_for_which_pytorch_makes_no_memory(self, device, compiled, dtype):
        def function(x):
            return x.unbind(-1)[4].sgn()

        x = torch.randn(3, 5, 6, dtype=dtype, device=device)
        found = []
        for call in (function, compiled(function)):
            given = x.clone().requires_grad_()
            call(given).real.sum().backward()
            found.append(given.grad)
        torch.testing.assert_close(found[1], found[0])

    def test_output_that_does_not_reach_any_leaf(self, compare_training):
        compare_training(
            lambda: lambda a, b: (a * 2, b * 2),
            lambda step: (torch.randn(3, requires_grad=True), torch.randn(3)),
        )


class TestPartialGradients:
    def test_only_one_of_two_outputs_used(self, compare_training):
        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(6, 6)
                self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(2))

            def forward(self, x):
                hidden = torch.tanh(self.body(x))
                return [head(hidden) for head in self.heads]

        # Torch materializes the unused tangent, so an untouched head gets zeros instead of None.
        def loss(outputs):
            return outputs[1].pow(2).sum() + 0.0 * outputs[0].sum()

        compare_training(Heads, lambda step: torch.randn(4, 6), loss=loss)

    def test_unused_output_gives_no_wrong_gradient(self, device, compiled):
        def function(a, b):
            return a * b, b.exp()

        got = []
        for call in (function, compiled(function)):
            a, b = (torch.full((3,), 2.0, device=device, requires_grad=True) for _ in range(2))
            call(a, b)[0].sum().backward()
            got.append((a.grad, b.grad))
        torch.testing.assert_close(got[1], got[0])

    def test_grad_with_respect_to_some_parameters(self, model, x, compiled):
        call = compiled(model)
        want = torch.autograd.grad(model(x).pow(2).sum(), [model[2].weight, x])
        got = torch.autograd.grad(call(x).pow(2).sum(), [model[2].weight, x])
        torch.testing.assert_close(got, want)
        assert all(p.grad is None for p in model.parameters())

    def test_each_output_backward_on_its_own(self, device, compiled):
        def function(a):
            shared = a.exp()
            return shared.sum(), (shared * a).sum()

        call = compiled(function)
        got = []
        for run in (function, call):
            a = torch.linspace(-1, 1, 5, device=device, requires_grad=True)
            first, second = run(a)
            first.backward(retain_graph=True)
            second.backward()
            got.append(a.grad)
        torch.testing.assert_close(got[1], got[0])

    def test_gradients_that_are_zeros_without_memory(self, model, x, compiled):
        call = compiled(model)
        for _ in range(2):
            zeros = torch._efficientzerotensor((4, 3), device=x.device)
            (got,) = torch.autograd.grad(call(x), [x], zeros)
            assert not got.any()

    def test_several_outputs_in_one_backward(self, device, compiled):
        def function(a):
            return a.exp(), a.sin()

        got = []
        for run in (function, compiled(function)):
            a = torch.linspace(-1, 1, 5, device=device, requires_grad=True)
            outputs = run(a)
            torch.autograd.backward(outputs, [torch.ones_like(a), a.detach().clone()])
            got.append(a.grad)
        torch.testing.assert_close(got[1], got[0])

    @pytest.mark.parametrize(
        "function",
        [
            pytest.param(
                lambda a: (a[:, :3].sin(), a[:, 3:5].cos(), a[:, 5:].exp() * 2), id="columns"
            ),
            pytest.param(
                lambda a: (a[:1].sin(), a[1:3].cos().exp(), a[3:].exp() * a[3:]), id="rows"
            ),
            pytest.param(
                lambda a: tuple(part.sin().exp() for part in a.unflatten(1, (2, 3)).unbind(2)),
                id="dims",
            ),
            pytest.param(lambda a: (a.sin(), a.sum(0).exp(), (a * a.sum()).tanh()), id="sums"),
            pytest.param(lambda a: (a.sin(), a + 1, a.t() - 0.5), id="as they come"),
            pytest.param(
                lambda a: tuple(part.softmax(-1) for part in (a @ a.T).split([1, 2, 1], -1)),
                id="products",
            ),
        ],
    )
    @pytest.mark.parametrize("read", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
    @pytest.mark.parametrize("factor", [None, 2])
    def test_gradients_of_some_parts(self, device, compiled, function, read, factor):
        def parts(a):
            return function(a if factor is None else a * factor)

        got = []
        for run in (parts, compiled(parts)):
            a = torch.linspace(-1, 0.8, 24, device=device).view(4, 6).requires_grad_()
            outputs = run(a)
            sum(outputs[i].square().sum() for i in read).backward()
            got.append(a.grad)
        torch.testing.assert_close(got[1], got[0])


class TestAccumulation:
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_with_both_ways_of_zeroing(self, model, x, compiled, set_to_none):
        reference = copy.deepcopy(model)
        call = compiled(model)
        for _ in range(3):
            for module, run in ((reference, reference), (model, call)):
                module.zero_grad(set_to_none=set_to_none)
                run(x.detach()).pow(2).sum().backward()
            torch.testing.assert_close(gradients(model), gradients(reference))

    def test_into_a_gradient_buffer_of_the_user(self, model, x, compiled):
        reference = copy.deepcopy(model)
        call = compiled(model)
        buffers = [torch.zeros_like(p) for p in model.parameters()]
        for parameter, buffer in zip(model.parameters(), buffers, strict=True):
            parameter.grad = buffer
        for _ in range(2):
            call(x.detach()).sum().backward()
            reference(x.detach()).sum().backward()
        torch.testing.assert_close(buffers, gradients(reference))
        assert all(p.grad is b for p, b in zip(model.parameters(), buffers, strict=True))


class TestRetainedGraphs:
    def test_many_backwards_of_one_forward(self, model, x, compiled):
        output = compiled(model)(x)
        jacobian = [torch.autograd.grad(output[0, i], x, retain_graph=True)[0] for i in range(3)]
        want = torch.autograd.functional.jacobian(lambda v: model(v)[0], x.detach())
        torch.testing.assert_close(torch.stack(jacobian), want)

    def test_training_goes_on_after_a_retained_backward(self, model, x, compiled):
        reference = copy.deepcopy(model)
        call = compiled(model)
        for module, run in ((reference, reference), (model, call)):
            run(x.detach()).sum().backward(retain_graph=True)
            for _ in range(2):
                run(x.detach()).pow(2).sum().backward()
            assert module[0].weight.grad is not None
        torch.testing.assert_close(gradients(model), gradients(reference))

    @pytest.mark.aot_eager_fails("donated buffers: the first backward decides for all others")
    def test_retain_graph_after_plain_steps(self, model, x, compiled):
        reference = copy.deepcopy(model)
        call = compiled(model)
        for run in (reference, call):
            run(x.detach()).sum().backward()
            loss = run(x.detach()).pow(2).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        torch.testing.assert_close(gradients(model), gradients(reference))


class TestHigherOrder:
    def test_create_graph_gives_right_first_gradients(self, model, x, compiled):
        want = torch.autograd.grad(model(x).pow(2).sum(), x)[0]
        got = torch.autograd.grad(compiled(model)(x).pow(2).sum(), x, create_graph=True)[0]
        torch.testing.assert_close(got, want)
        assert got.requires_grad

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_gradient_of_a_gradient_inside_the_function(self, device, compiled):
        def penalty(weight, data):
            return torch.func.grad(lambda w: (data @ w).tanh().sum())(weight)

        data = torch.linspace(-1, 1, 12, device=device).reshape(3, 4)
        weight = torch.linspace(-1, 1, 4, device=device)
        torch.testing.assert_close(compiled(penalty)(weight, data), penalty(weight, data))

    def test_gradcheck(self, device, compiled):
        call = compiled(lambda a, b: F.softmax(a @ b, -1).log().sum(-1) * a.sum(-1))
        inputs = [
            torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True),
            torch.randn(3, 3, dtype=torch.float64, device=device, requires_grad=True),
        ]
        assert torch.autograd.gradcheck(call, inputs)

    @pytest.mark.parametrize(
        "transform",
        [
            lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
            lambda f, x: torch.func.vmap(f)(x),
            lambda f, x: torch.func.jacrev(f)(x),
            lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        ],
        ids=["grad", "vmap", "jacrev", "jvp"],
    )
    def test_function_transforms_around_a_compiled_function(self, device, compiled, transform):
        def function(v):
            return (v * v).sin()

        x = torch.linspace(-1, 1, 4, device=device)
        call = compiled(function, fullgraph=False)
        torch.testing.assert_close(transform(call, x), transform(function, x))


class TestCompiledAutograd:
    """Torch may trace the whole backward pass, through the call of a compiled backward."""

    def test_gradients(self, model, x, compiled):
        reference = copy.deepcopy(model)
        call = compiled(model)
        trace = torch.compile(backend="eager")
        for _ in range(2):
            reference(x.detach()).pow(2).sum().backward()
            loss = call(x.detach()).pow(2).sum()
            with torch._dynamo.compiled_autograd._enable(trace):
                loss.backward()
        torch.testing.assert_close(gradients(model), gradients(reference))


class TestLayoutsAndDtypes:
    def test_gradients_have_the_strides_of_their_parameters(self, device, compiled):
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3).to(device).to(memory_format=torch.channels_last)
        linear = nn.Linear(6, 3).to(device)
        linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
        compiled(conv)(torch.randn(2, 3, 6, 6, device=device)).sum().backward()
        compiled(linear)(torch.randn(2, 6, device=device)).sum().backward()
        assert conv.weight.grad.stride() == conv.weight.stride()
        assert linear.weight.grad.stride() == linear.weight.stride()

    def test_gradients_are_clipped_and_scaled_in_place(self, model, x, compiled):
        reference = copy.deepcopy(model)
        call = compiled(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        for _ in range(3):
            for module, run, optimizer in zip(
                (reference, model), (reference, call), optimizers, strict=True
            ):
                optimizer.zero_grad()
                (run(x.detach()).pow(2).sum() * 10).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got, want)

    def test_tangent_without_dimensions(self, device, compiled):
        def function(a):
            return a.exp().sum()

        got = []
        for run in (function, compiled(function)):
            a = torch.linspace(0, 1, 4, device=device, requires_grad=True)
            run(a).backward(torch.tensor(2.5, device=device))
            got.append(a.grad)
        torch.testing.assert_close(got[1], got[0])


class TestLosses:
    @pytest.mark.parametrize(
        "loss",
        [
            lambda logits, labels: F.cross_entropy(logits, labels),
            lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=1),
            lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1),
            lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels),
            pytest.param(
                lambda logits, labels: F.multi_margin_loss(logits, labels),
                marks=pytest.mark.hands_over("PyTorch's shapes of it on a GPU want numbers"),
            ),
            lambda logits, labels: F.mse_loss(logits, F.one_hot(labels, 5).float()),
            lambda logits, labels: F.huber_loss(logits, F.one_hot(labels, 5).float()),
            lambda logits, labels: F.binary_cross_entropy_with_logits(
                logits, F.one_hot(labels, 5).float()
            ),
            lambda logits, labels: F.kl_div(
                logits.log_softmax(-1),
                F.one_hot(labels, 5).float() * 0.8 + 0.04,
                reduction="batchmean",
            ),
        ],
        ids=[
            "cross_entropy", "ignored_labels", "label_smoothing", "nll", "multi_margin", "mse",
            "huber", "binary_cross_entropy", "kl_div",
        ],
    )  # fmt: skip
    def test_inside_the_graph(self, compare_training, loss):
        compare_training(
            lambda: module_with(
                lambda self, x, labels: loss(self.linear(x), labels), linear=nn.Linear(6, 5)
            ),
            lambda step: (torch.randn(4, 6), torch.randint(0, 5, (4,))),
            loss=lambda value: value,
        )

    def test_every_label_ignored_gives_nan_as_in_eager(self, compare_training):
        compare_training(
            lambda: lambda x, labels: F.cross_entropy(x, labels),
            lambda step: (torch.randn(4, 5, requires_grad=True), torch.full((4,), -100)),
            loss=lambda value: value,
            steps=1,
        )


@pytest.mark.parametrize(
    ("places", "shape"),
    [("i:", (2, 3, 4)), (":i", (3, 2, 4)), ("i:i", (2, 3)), ("ii:", (2, 4)), (":i:", (3, 2, 4))],
)
def test_absent_tensors_in_a_list_beside_a_result_without_gradient(
    compiled, assert_engine_ran, places, shape
):
    """The gradient of what is written is read at the same places, with an absent tensor for ':'."""
    rows = torch.tensor([1, 0])
    indices = [rows if place == "i" else None for place in places]

    def written(x, values):
        return torch.ops.aten.index_put(x * 2, indices, values * 3).square().sum(), x.exp()

    engine = compiled(written)
    x = torch.linspace(-1, 1, 36).view(3, 3, 4).requires_grad_()
    values = torch.linspace(0, 1, torch.Size(shape).numel()).view(shape).requires_grad_()
    for _ in range(2):  # the second call expects the gradients of the first
        found = torch.autograd.grad(engine(x, values)[0], (x, values))
    torch.testing.assert_close(found, torch.autograd.grad(written(x, values)[0], (x, values)))
    assert_engine_ran(backward=True)
