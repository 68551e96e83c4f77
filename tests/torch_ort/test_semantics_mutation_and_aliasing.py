# Who shares memory with whom: inputs changed in place, views of one base, outputs that alias,
# and results the user keeps. Edits between forward and backward: test_semantics_edits.py.
from __future__ import annotations

import copy
import gc

import pytest
import torch
from models import module_with
from torch import nn

from tests.roads import ROADS

pytestmark = pytest.mark.both_roads

EDITED = "modified by an inplace operation"


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 6)


def rows_with_gradient(step: int) -> torch.Tensor:
    return torch.randn(4, 6, requires_grad=True)


class TestMutatedInputs:
    @pytest.mark.hands_over("an input that is written into")
    def test_input_without_gradient(self, compare_training):
        def add_one(x, w):
            x.add_(1)
            return (x * w).sum(-1)

        compare_training(
            lambda: add_one, lambda step: (torch.randn(4, 6), torch.randn(6, requires_grad=True))
        )

    def check_with_gradient(self, both, device, function):
        results = []
        for call in both(function):
            torch.manual_seed(0)
            leaf = torch.randn(4, 6, device=device, requires_grad=True)
            w = torch.randn(6, device=device, requires_grad=True)
            x = leaf + 0
            y = call(x, w)
            (x.sin().sum() + y.pow(2).sum()).backward()
            results.append((x.detach(), y.detach(), leaf.grad, w.grad))
        torch.testing.assert_close(results[1], results[0])

    @pytest.mark.hands_over("an input that is written into")
    @pytest.mark.parametrize(
        "change",
        [
            lambda x, w: x.add_(w),
            lambda x, w: x.add_(w).exp_(),
            lambda x, w: x[1].add_(w),
            lambda x, w: x.copy_(w),
            lambda x, w: x.zero_(),
        ],
        ids=["add_", "exp_", "row", "copy_", "zero_"],
    )
    def test_input_with_gradient(self, both, device, change):
        def function(x, w):
            change(x, w)
            return x.sin() * w

        self.check_with_gradient(both, device, function)

    @pytest.mark.hands_over("an input that is written into")
    @pytest.mark.aot_eager_fails("it saves the input itself, then copies the new value into it")
    def test_input_whose_old_value_backward_reads(self, both, device):
        def function(x, w):
            x.mul_(w)
            return x.exp()

        self.check_with_gradient(both, device, function)

    @pytest.mark.hands_over("an input that is written into")
    def test_slice_of_an_input(self, compare_training):
        def fill_row(cache, row, w):
            cache[1] = row
            cache[:, 2].mul_(2)
            return cache * w

        compare_training(
            lambda: fill_row,
            lambda step: (torch.zeros(4, 6), torch.randn(6), torch.randn(6, requires_grad=True)),
        )

    def test_buffer(self, compare_training):
        class Average(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(6, 6)
                self.register_buffer("mean", torch.zeros(6))
                self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

            def forward(self, x):
                y = self.linear(x)
                self.mean.lerp_(y.detach().mean(0), 0.1)
                self.calls += 1
                return y - self.mean

        want, _ = compare_training(Average, rows)
        assert want.records[-1]["buffer calls"] == 3

    def test_buffer_replaced_by_a_new_tensor(self, compare_training):
        def forward(self, x):
            y = self.linear(x) + self.last
            self.last = y.detach().mean(0)
            return y

        compare_training(
            lambda: module_with(forward, linear=nn.Linear(6, 6), last=torch.zeros(6)), rows
        )

    def test_cache_written_at_an_index(self, compare_training):
        def forward(self, x, position):
            self.keys.index_copy_(0, position, self.linear(x).detach())
            return self.linear(x) @ self.keys.t()

        compare_training(
            lambda: module_with(forward, linear=nn.Linear(6, 6), keys=torch.zeros(8, 6)),
            lambda step: (torch.randn(2, 6), torch.tensor([2 * step, 2 * step + 1])),
        )

    @pytest.mark.hands_over("an input that is written into")
    def test_parameter_changed_under_no_grad(self, compare_training):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
            return x @ self.weight

        compare_training(lambda: module_with(forward, weight=nn.Parameter(torch.randn(6, 6))), rows)

    @pytest.mark.hands_over("an input that is written into")
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_inference(self, compare_training, mode):
        def add_one(x):
            x.add_(1)
            return x * 2, x[0]

        compare_training(lambda: add_one, rows, forward_context=mode)

    def test_reshaped_in_place_inside(self, compare_training):
        def reshape(x):
            y = x * 2
            y.t_()
            y.unsqueeze_(0)
            return y.exp()

        compare_training(lambda: reshape, rows_with_gradient)

    @pytest.mark.hands_over("an input that is written into")
    def test_transposed_in_place(self, device, compiled):
        def transpose(x):
            x.t_()
            return x * 2

        results = []
        # Torch breaks the graph at such a call.
        for call in (transpose, compiled(transpose, fullgraph=False)):
            x = torch.arange(6.0, device=device).reshape(2, 3)
            results.append((call(x), x, x.stride()))
        torch.testing.assert_close(results[1], results[0])

    @pytest.mark.hands_over("an input that is written into")
    def test_version_counter_moves(self, device, both):
        def change(x):
            x.add_(1)
            return x * 2

        for call in both(change):
            x = torch.zeros(3, device=device)
            before = x._version
            call(x)
            assert x._version > before

    @pytest.mark.hands_over("PyTorch words the error")
    def test_edit_by_the_module_of_what_backward_reads(self, device, both):
        def forward(self, x):
            y = x * self.scale
            self.scale.add_(1)
            return y

        # Torch refuses this while it traces; the words are those of eager.
        for call in both(module_with(forward, scale=torch.ones(6)).to(device)):
            x = torch.randn(4, 6, device=device, requires_grad=True)
            with pytest.raises(Exception, match=EDITED):
                call(x).sum().backward()


class TestAliasingInputs:
    def test_same_tensor_twice(self, compare_training):
        def inputs(step):
            x = torch.randn(4, 6, requires_grad=True)
            return x, x

        compare_training(lambda: lambda a, b: a * b + b.sin(), inputs)

    def test_same_tensor_twice_then_two_tensors(self, compare_training):
        def inputs(step):
            x = torch.randn(4, 6, requires_grad=True)
            return (x, x) if step % 2 == 0 else (x, torch.randn(4, 6, requires_grad=True))

        compare_training(lambda: lambda a, b: a * b + b.sin(), inputs, steps=4)

    def test_views_of_one_base(self, compare_training):
        def inputs(step):
            base = torch.randn(8, 6, requires_grad=True)
            return base[:5], base[3:], base

        compare_training(lambda: lambda a, b, base: (a[:3] * b[:3], base.exp()), inputs)

    @pytest.mark.hands_over("an input that is written into")
    @pytest.mark.compile_only("runs in PyTorch")
    def test_overlapping_views_one_of_them_changed(self, device, both):
        def change(a, b):
            a.mul_(2)
            return a.sum(0) * b.sum(0)

        results = []
        for call in both(change):
            base = torch.arange(24.0, device=device).reshape(6, 4)
            results.append((call(base[:4], base[2:]), base))
        torch.testing.assert_close(results[1], results[0])

    @pytest.mark.hands_over("an input that is written into")
    @pytest.mark.compile_only("runs in PyTorch")
    def test_overlapping_views_changed_with_gradient(self, device, both):
        def change(a, b):
            a.mul_(2)
            return a * b.sum()

        results = []
        for call in both(change):
            leaf = torch.arange(24.0, device=device).reshape(6, 4).requires_grad_()
            base = leaf + 0
            y = call(base[:4], base[2:])
            (y.sum() + base.pow(2).sum()).backward()
            results.append((y.detach(), base.detach(), leaf.grad))
        torch.testing.assert_close(results[1], results[0])

    @pytest.mark.hands_over("an input that is written into")
    @pytest.mark.compile_only("runs in PyTorch")
    def test_disjoint_views_one_of_them_changed(self, device, both):
        def change(a, b):
            a.add_(b)
            return a.exp()

        results = []
        for call in both(change):
            base = torch.linspace(0, 1, 24, device=device).reshape(6, 4)
            results.append((call(base[:3], base[3:]), base))
        torch.testing.assert_close(results[1], results[0])

    def test_parameter_passed_as_input_too(self, device, both):
        model = module_with(
            lambda self, x, other: x @ self.weight + other,
            weight=nn.Parameter(torch.linspace(-1, 1, 36).reshape(6, 6)),
        ).to(device)
        gradients = []
        for call in both(model):
            model.zero_grad()
            call(torch.ones(6, 6, device=device), model.weight).pow(2).sum().backward()
            gradients.append(model.weight.grad)
        torch.testing.assert_close(gradients[1], gradients[0])


class TestAliasingOutputs:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: (x, x * 2),
            lambda x: (x.view(-1), x * 2),
            lambda x: (x[0], x[1:].t(), x.exp()),
            lambda x: (x.t(), x.exp().t()),
            lambda x: x.detach(),
            lambda x: (x.exp(), x.detach() + 1),
        ],
        ids=["input_itself", "view", "slices", "two_bases", "detached", "mixed"],
    )
    def test_of_an_input(self, compare_training, function):
        compare_training(lambda: function, rows_with_gradient)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.exp().view(-1),
            lambda x: (x.exp(),) * 2,
            lambda x: (lambda e: (e, e.view(-1), e[0]))(x.exp()),
            lambda x: (lambda e: (e.t(), e[1]))(x.exp()),
            lambda x: (lambda e: (e, e.detach()))(x.exp()),
            lambda x: (lambda e: (e.detach(), e * 2))(x.sigmoid()),
            lambda x: x.exp().split(2),
            lambda x: x.exp().unbind(1),
            lambda x: (x * 2).expand(3, 4, 6),
            lambda x: x.sum(0).expand(5, 6),
        ],
        ids=[
            "one_view", "same_twice", "base_and_views", "two_views", "and_detached",
            "only_detached", "split", "unbind", "expand", "expand_of_a_sum",
        ],
    )  # fmt: skip
    def test_of_an_intermediate(self, compare_training, function):
        compare_training(lambda: function, rows_with_gradient)

    def test_edit_of_a_view_shows_in_the_input(self, device, both):
        def view(x):
            return x.view(-1), x.sum()

        for call in both(view):
            x = torch.zeros(2, 3, device=device)
            flat, _ = call(x)
            flat.add_(1)
            assert x.eq(1).all()

    def test_edit_of_one_view_shows_in_the_other(self, device, both):
        def views(x):
            y = x * 2
            return y, y.view(-1), y[0]

        for call in both(views):
            y, flat, first = call(torch.zeros(2, 3, device=device))
            flat.add_(1)
            assert y.eq(1).all()
            assert first.eq(1).all()

    def test_edit_of_one_output_leaves_the_others(self, device, both):
        def outputs(x):
            return x * 2, x * 2, (x * 2).clone()

        for call in both(outputs):
            a, b, c = call(torch.zeros(2, 3, device=device))
            a.add_(1)
            assert not b.any()
            assert not c.any()

    def test_gradient_of_an_edited_view(self, device, both):
        def views(x):
            y = x * 2
            return y, y[0]

        gradients = []
        for call in both(views):
            x = torch.ones(2, 3, device=device, requires_grad=True)
            y, first = call(x)
            first.mul_(3)
            y.pow(2).sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[1], gradients[0])


class TestResultsTheUserKeeps:
    def test_outputs_outlive_later_calls(self, device, compiled, assert_engine_ran):
        def function(x):
            return x.exp(), x.sum(0), x * 2

        call = compiled(function)
        torch.manual_seed(0)
        inputs = [torch.randn(8, 8, device=device) for _ in range(5)]
        kept = [call(x) for x in inputs]
        for x, outputs in zip(inputs, kept, strict=True):
            torch.testing.assert_close(outputs, function(x))
        assert_engine_ran()

    def test_outputs_and_gradients_outlive_later_steps(self, device, compiled, assert_engine_ran):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        call = compiled(model)
        inputs = [torch.randn(4, 6, device=device, requires_grad=True) for _ in range(4)]
        kept = []
        for x in inputs:
            output = call(x)
            output.pow(2).sum().backward()
            kept.append((output, [p.grad for p in model.parameters()], x.grad))
            model.zero_grad(set_to_none=True)
        for x, (output, gradients, input_gradient) in zip(inputs, kept, strict=True):
            want = model(x)
            torch.testing.assert_close(output, want)
            expected = torch.autograd.grad(want.pow(2).sum(), [*model.parameters(), x])
            torch.testing.assert_close([*gradients, input_gradient], list(expected))
        assert_engine_ran(backward=True)

    def test_equal_gradients_do_not_share_memory(self, device, both):
        def add(a, b):
            return a + b

        for call in both(add):
            a, b = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
            call(a, b).sum().backward()
            a.grad.add_(5)
            assert b.grad.eq(1).all()

    def test_gradient_does_not_share_memory_with_the_tangent(self, device, both):
        def add_one(a):
            return a + 1

        for call in both(add_one):
            a = torch.ones(3, device=device, requires_grad=True)
            tangent = torch.ones(3, device=device)
            call(a).backward(tangent)
            a.grad.add_(5)
            assert tangent.eq(1).all()

    def test_gradient_does_not_share_memory_with_what_is_saved(self, device, both):
        def product(a, b):
            return a * b

        for call in both(product):
            a = torch.full((3,), 2.0, device=device, requires_grad=True)
            b = torch.full((3,), 3.0, device=device, requires_grad=True)
            call(a, b).sum().backward()
            a.grad.zero_()
            b.grad.zero_()
            assert a.eq(2).all()
            assert b.eq(3).all()

    def test_edit_of_an_output_that_backward_does_not_read(self, device, both):
        def linear(a, b):
            return a + 2 * b

        gradients = []
        for call in both(linear):
            a, b = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
            y = call(a, b)
            y.mul_(4)
            y.sum().backward()
            gradients.append((a.grad, b.grad))
        torch.testing.assert_close(gradients[1], gradients[0])


class Replaced(nn.Module):
    """Gives other memory to a tensor of its own, as spectral norms do."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))
        self.name = name

    def forward(self, x):
        y = self.linear(x)
        tensor = self.scale if self.name == "scale" else self.mean
        tensor.data = y.mean(0).data
        return y * self.scale + self.mean


@pytest.mark.hands_over("a tensor gets other memory")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("name", ["scale", "mean"])
def test_memory_that_forward_gives_to_a_tensor_lasts(name, with_grad, road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = Replaced(name)
    eager = copy.deepcopy(model)
    call = ROADS[road](model)
    for step in range(3):
        x = rows(step)
        with torch.set_grad_enabled(with_grad):
            got, want = call(x), eager(x)
        torch.testing.assert_close(got, want)
        if with_grad:
            got.sum().backward()
            want.sum().backward()
        del got
        gc.collect()
        torch.full((64,), 7.0)  # takes memory that is free
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
