# Operators that nobody translated: custom ones in Python and C++ registration, mutating ones,
# autograd functions, higher-order operators, tensor subclasses and effects.
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from models import module_with
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.both_roads

calls: list[str] = []


@torch.library.custom_op("torch_ort_tests::cube", mutates_args=())
def cube(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    calls.append("cube")
    return x**3 * scale


@cube.register_fake
def _(x, scale=1.0):
    return torch.empty_like(x)


def _save_for_cube(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _cube_backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * 3 * x**2 * ctx.scale, None


cube.register_autograd(_cube_backward, setup_context=_save_for_cube)


@torch.library.custom_op("torch_ort_tests::halves", mutates_args=())
def halves(x: torch.Tensor, parts: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    return [part.clone() for part in x.split(parts)], x.sum()


@halves.register_fake
def _(x, parts):
    return [x.new_empty((part, *x.shape[1:])) for part in parts], x.new_empty(())


@torch.library.custom_op("torch_ort_tests::accumulate", mutates_args={"total"})
def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    calls.append("accumulate")
    total.add_(x.sum(0))


@torch.library.custom_op("torch_ort_tests::fill_both", mutates_args={"a", "b"})
def fill_both(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.copy_(x * 2)
    b.add_(1)
    return x.exp()


@fill_both.register_fake
def _(a, x, b):
    return torch.empty_like(x)


@torch.library.custom_op("torch_ort_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("torch_ort_tests::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        raise ValueError("refuse: got a positive sum")
    return x.clone()


@refuse.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.fixture(scope="module", autouse=True)
def schema_library() -> Iterator[None]:
    """Define operators as a third party's library does: a schema and kernels per backend."""
    library = torch.library.Library("torch_ort_tests_schema", "DEF")
    library.define("scaled_add(Tensor a, Tensor b, *, Scalar alpha=1, int[]? dims=None) -> Tensor")

    def scaled_add(a, b, *, alpha=1, dims=None):
        out = a + alpha * b
        return out.sum(dims) if dims is not None else out

    library.impl("scaled_add", scaled_add, "CompositeExplicitAutograd")
    torch.library.register_fake("torch_ort_tests_schema::scaled_add", scaled_add, lib=library)

    def backward(ctx, gradient):
        return gradient.expand(ctx.shape), ctx.alpha * gradient.expand(ctx.shape)

    def setup(ctx, inputs, keyword_only_inputs, output):
        ctx.shape, ctx.alpha = inputs[0].shape, keyword_only_inputs["alpha"]

    torch.library.register_autograd(
        "torch_ort_tests_schema::scaled_add", backward, setup_context=setup, lib=library
    )
    yield
    library._destroy()


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 6, requires_grad=True)


class TestCustomOps:
    def test_functional(self, compare_training):
        compare_training(lambda: lambda x: cube(x.tanh(), 0.5).sum(-1), rows)

    def test_runs_once_per_forward(self, compiled):
        call = compiled(lambda x: cube(x) + 1)
        x = torch.ones(3, requires_grad=True)
        call(x).sum().backward()
        calls.clear()
        call(x).sum().backward()
        assert calls == ["cube"]

    def test_between_layers(self, compare_training):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(6, 8)
                self.second = nn.Linear(8, 2)

            def forward(self, x):
                return self.second(cube(torch.tanh(self.first(x))))

        compare_training(Model, rows)

    def test_list_of_outputs(self, compare_training):
        def function(x):
            parts, total = halves(x.detach(), [1, 3])
            return x * parts[0] + total, parts[1] * 2

        compare_training(lambda: function, rows)

    def test_input_with_unusual_strides(self, compare_training):
        compare_training(lambda: lambda x: cube(x.t()[1:]) * 2, rows)

    def test_with_changing_sizes(self, compare_training):
        compare_training(
            lambda: lambda x: cube(x) * 2,
            lambda step: torch.randn(3 + step, 6, requires_grad=True),
            steps=4,
        )

    @pytest.mark.hands_over("unbacked sizes")
    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    def test_output_sized_by_data(self, compare_training):
        compare_training(lambda: lambda x: (positive(x.detach()) * 2, x.exp()), rows)

    def test_error_of_the_operator(self, compiled):
        call = compiled(lambda x: refuse(x) * 2)
        assert call(-torch.ones(3)).sum() == -6
        with pytest.raises(ValueError, match="refuse: got a positive sum"):
            call(torch.ones(3))
        assert call(-torch.ones(3)).sum() == -6

    def test_schema_and_kernels_of_a_third_party(self, compare_training):
        op = torch.ops.torch_ort_tests_schema.scaled_add
        compare_training(
            lambda: lambda a, b: (op(a, b), op(a, b, alpha=2.5, dims=[0])),
            lambda step: (rows(step), rows(step)),
        )


class TestMutatingOps:
    @pytest.mark.hands_over("a custom operator that writes into its arguments")
    def test_on_a_buffer(self, compare_training):
        def forward(self, x):
            y = self.linear(x)
            accumulate(self.total, y.detach())
            return y * 2

        compare_training(
            lambda: module_with(forward, linear=nn.Linear(6, 6), total=torch.zeros(6)), rows
        )

    @pytest.mark.hands_over("a custom operator that writes into its arguments")
    def test_on_an_input(self, compare_training):
        def function(total, x):
            accumulate(total, x)
            return total * 2

        compare_training(lambda: function, lambda step: (torch.zeros(6), torch.randn(4, 6)))

    @pytest.mark.hands_over("a custom operator that writes into its arguments")
    def test_on_an_intermediate(self, compare_training):
        def function(x):
            total = torch.zeros(6, device=x.device)
            accumulate(total, x.detach())
            before = total.clone()
            accumulate(total, x.detach() * 2)
            return x * total, before

        compare_training(lambda: function, rows)

    @pytest.mark.hands_over("a custom operator that writes into its arguments")
    def test_on_views_of_one_buffer(self, compare_training):
        def function(buffer, x):
            accumulate(buffer[0], x)
            accumulate(buffer[1:].view(-1)[:6], x * 2)
            return buffer.sum(0)

        compare_training(lambda: function, lambda step: (torch.zeros(3, 6), torch.randn(4, 6)))

    @pytest.mark.hands_over("a custom operator that writes into its arguments")
    def test_two_arguments_and_a_result(self, compare_training):
        def function(a, x, b):
            y = fill_both(a, x, b)
            return y + a, b * 2

        compare_training(
            lambda: function, lambda step: (torch.zeros(4, 6), torch.randn(4, 6), torch.zeros(3))
        )

    @pytest.mark.hands_over("a custom operator that writes into its arguments")
    def test_runs_once_per_forward(self, compiled):
        def function(total, x):
            accumulate(total, x)
            return total + x.sum()

        call = compiled(function)
        call(torch.zeros(6), torch.ones(4, 6))
        calls.clear()
        total = torch.zeros(6)
        call(total, torch.ones(4, 6))
        assert calls == ["accumulate"]
        assert total.eq(4).all()


class Scaled(torch.autograd.Function):
    """Doubles; its gradient is ten times that, so that a derived one would be noticed."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * 10 + 0 * x, None


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.max(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.shape = x.shape
        return values, indices

    @staticmethod
    def backward(ctx, gradient, _):
        (indices,) = ctx.saved_tensors
        result = torch.zeros(ctx.shape, device=gradient.device)
        return result.scatter(-1, indices.unsqueeze(-1), gradient.unsqueeze(-1) * 5)


class Stashing(torch.autograd.Function):
    """Keeps an intermediate as an attribute instead of saving it."""

    @staticmethod
    def forward(ctx, x):
        ctx.inner = x.exp()
        return ctx.inner.sum(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.unsqueeze(-1) * ctx.inner * 2


class TestAutogradFunctions:
    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: Scaled.apply(x.tanh(), 2.0),
            lambda x: TwoOutputs.apply(x * 2),
            lambda x: Stashing.apply(x.sin()),
            lambda x: Scaled.apply(Scaled.apply(x, 2.0).exp(), 0.5),
        ],
        ids=["saved", "two_outputs", "stashed", "twice"],
    )
    def test_custom_gradient(self, compare_training, function):
        compare_training(lambda: function, rows)

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_inside_a_module(self, compare_training):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(6, 6)

            def forward(self, x):
                return self.linear(Scaled.apply(self.linear(x), 0.1))

        compare_training(Model, rows)

    def test_straight_through_estimator(self, compare_training):
        compare_training(lambda: lambda x: x + (x.round() - x).detach(), rows)


class TestHigherOrderOps:
    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_cond(self, compare_training, sign):
        def function(x, offset):
            return torch.cond(offset.sum() > 0, lambda v: v.sin() * 2, lambda v: v.exp() + 1, (x,))

        compare_training(
            lambda: function,
            lambda step: (rows(step), torch.full((2,), sign * (1 - 2 * (step % 2)))),
        )

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_cond_in_a_module(self, compare_training):
        class Switch(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(6, 6)
                self.second = nn.Linear(6, 6)

            def forward(self, x):
                return torch.cond(x.mean() > 0, self.first, self.second, (x,))

        compare_training(Switch, rows, steps=4)

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_while_loop(self, compare_training):
        def function(x, count):
            def more(i, value):
                return i < count

            def step(i, value):
                return i + 1, value * 1.5 + 1

            return while_loop(more, step, (torch.zeros_like(count), x.detach()))[1]

        compare_training(lambda: function, lambda step: (torch.randn(3), torch.tensor(2 + step)))

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_nested_compile_region(self, compare_training):
        @torch.compiler.nested_compile_region
        def layer(x, weight):
            return torch.tanh(x @ weight)

        class Repeated(nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = nn.ParameterList(torch.randn(6, 6) * 0.3 for _ in range(3))

            def forward(self, x):
                for weight in self.weights:
                    x = layer(x, weight)
                return x

        compare_training(Repeated, rows)

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_flex_attention_without_gradients(self, compare_training):
        def function(q, k, v):
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1)

        compare_training(
            lambda: function,
            lambda step: tuple(torch.randn(1, 2, 16, 8) for _ in range(3)),
            forward_context=torch.no_grad,
            rtol=1e-4,
            atol=1e-5,
        )

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_flex_attention_with_a_block_mask(self, compare_training, device):
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=device)
        compare_training(
            lambda: lambda q, k, v: flex_attention(q, k, v, block_mask=mask),
            lambda step: tuple(torch.randn(1, 1, 128, 8) for _ in range(3)),
            forward_context=torch.no_grad,
            steps=1,
            rtol=1e-4,
            atol=1e-5,
        )

    @pytest.mark.cuda
    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_flex_attention_trains(self, compiled, assert_engine_ran):
        def function(q, k, v):
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1)

        got = []
        for call in (function, compiled(function)):
            torch.manual_seed(0)
            qkv = [torch.randn(1, 2, 64, 16, device="cuda", requires_grad=True) for _ in range(3)]
            call(*qkv).pow(2).sum().backward()
            got.append([x.grad for x in qkv])
        torch.testing.assert_close(got[1], got[0], rtol=1e-3, atol=1e-3)
        assert_engine_ran(backward=True)


class TestSubclassesAndEffects:
    @pytest.mark.hands_over("the recorder takes no such inputs")
    @pytest.mark.compile_only("subclasses run in PyTorch")
    def test_wrapper_subclass(self, device, compiled):
        from torch.testing._internal.two_tensor import TwoTensor

        def function(x, w):
            return torch.tanh(x @ w)

        got = []
        for call in (function, compiled(function)):
            torch.manual_seed(0)
            pair = TwoTensor(torch.randn(3, 4, device=device), torch.randn(3, 4, device=device))
            pair.requires_grad_()
            w = torch.randn(4, 4, device=device, requires_grad=True)
            call(pair, w).sum().backward()
            got.append((pair.grad.a, pair.grad.b))
        torch.testing.assert_close(got[1], got[0])

    @pytest.mark.hands_over("the recorder takes no such inputs")
    def test_parameter_subclass(self, compare_training):
        class Marked(nn.Parameter):
            pass

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = Marked(torch.randn(6, 3))

            def forward(self, x):
                return x @ self.weight

        compare_training(Model, rows)

    @pytest.mark.hands_over("Dynamo gives an operator that takes graphs")
    def test_print_inside_a_graph(self, capfd, compiled):
        def function(x):
            torch._higher_order_ops.print("total {total}", total=x.sum())
            return x.exp()

        call = compiled(function)
        for value in (1.0, 2.0):
            x = torch.full((3,), value, requires_grad=True)
            call(x).sum().backward()
            torch.testing.assert_close(x.grad, x.detach().exp())
        printed = capfd.readouterr().out
        assert printed.count("total") == 2
        assert "6" in printed

    def test_assertion_inside_a_graph(self, compiled):
        def function(x):
            torch._assert_async((x > 0).all(), "values must be positive")
            return F.relu(x).log()

        call = compiled(function)
        assert call(torch.ones(3)).sum() == 0
        with pytest.raises(RuntimeError, match="values must be positive"):
            call(-torch.ones(3))
