# Tensors edited in place between forward and backward: autograd's own error, never a wrong number.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import module_with
from torch import nn
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.both_roads

EDITED = "modified by an inplace operation"


def exp_and_alias(alias: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def function(x, w):
        e = x.exp()
        return alias(e), e

    return function


# What is run, and what is edited between forward and backward.
EDITS = {
    "exp": (lambda x, w: x.exp(), lambda x, w, y: y.add_(1)),
    "sigmoid": (lambda x, w: torch.sigmoid(x @ w), lambda x, w, y: y.add_(1)),
    "softmax": (lambda x, w: torch.softmax(x, -1), lambda x, w, y: y.add_(1)),
    "sqrt": (lambda x, w: torch.sqrt(x.abs() + 1), lambda x, w, y: y.add_(1)),
    "a view beside its base": (exp_and_alias(torch.t), lambda x, w, y: y[0].add_(1)),
    "a base beside its view": (exp_and_alias(torch.t), lambda x, w, y: y[1].add_(1)),
    "a detached alias": (exp_and_alias(torch.detach), lambda x, w, y: y[0].add_(1)),
    "input": (lambda x, w: x * x, lambda x, w, y: x.add_(1)),
    "input read through a view": (lambda x, w: (x.t() @ x).exp() * 2, lambda x, w, y: x.add_(1)),
    "weight": (lambda x, w: x @ w, lambda x, w, y: w.add_(1)),
    "weight read through a view": (nn.functional.linear, lambda x, w, y: w.mul_(2)),
    "view of a weight": (lambda x, w: x @ w, lambda x, w, y: w[0].add_(1)),
}


class TestEditBeforeBackward:
    """What eager refuses must be refused, since the gradient would be silently wrong."""

    @pytest.mark.parametrize("name", EDITS)
    def test_of_a_tensor_that_backward_reads(self, both, device, name):
        function, edit = EDITS[name]
        for call in both(function):
            torch.manual_seed(0)
            x = torch.randn(4, 6, device=device, requires_grad=True)
            w = torch.randn(6, 6, device=device, requires_grad=True)
            outputs = call(x, w)
            with torch.no_grad():
                edit(x, w, outputs)
            loss = sum(y.sum() for y in tree_leaves(outputs) if y.requires_grad)
            with pytest.raises(RuntimeError, match=EDITED):
                loss.backward()

    @pytest.mark.aot_eager_fails("a single view of a saved value gets a version counter of its own")
    @pytest.mark.parametrize(
        "view",
        [lambda e: e.view(-1), lambda e: e[0], lambda e: e.t()],
        ids=["view", "select", "transpose"],
    )
    def test_single_view_of_a_saved_value(self, both, device, view):
        # Eager refuses. The engine gives such an output memory of its own: the edit spoils nothing.
        _, compiled = both(lambda x, w: view(x.exp()))
        x = torch.randn(4, 6, device=device, requires_grad=True)
        expected = x.exp().detach()
        output = compiled(x, x)
        with torch.no_grad():
            output.add_(1)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        kept = torch.zeros_like(expected)
        view(kept).fill_(1)
        torch.testing.assert_close(gradient, expected * kept)

    def test_weight_changed_by_the_optimizer(self, both, device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
        for call in both(model):
            loss = call(torch.randn(4, 6, device=device)).sum()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            with pytest.raises(RuntimeError, match=EDITED):
                loss.backward()

    def test_buffer(self, both, device):
        model = module_with(lambda self, x: (x * self.scale).sum(), scale=torch.ones(6)).to(device)
        for call in both(model):
            loss = call(torch.randn(4, 6, device=device, requires_grad=True))
            model.scale.add_(1)
            with pytest.raises(RuntimeError, match=EDITED):
                loss.backward()

    def test_edit_through_data_is_invisible_as_in_eager(self, both, device):
        def square(x):
            return x * x

        gradients = []
        for call in both(square):
            x = torch.ones(3, device=device, requires_grad=True)
            y = call(x)
            x.data.add_(1)
            y.sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[1], gradients[0])

    def test_next_step_works_after_the_error(self, both, device, compiled):
        call = compiled(lambda x: x.exp())
        x = torch.zeros(3, device=device, requires_grad=True)
        y = call(x)
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match=EDITED):
            y.sum().backward()
        call(x).sum().backward()
        assert x.grad.eq(1).all()
