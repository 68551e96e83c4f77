"""Gradients of gradients through the engine, on both roads, against eager PyTorch in float64.

| what                                              | has to give                                  |
| ------------------------------------------------- | -------------------------------------------- |
| penalties, Hessians, third derivatives, gradgrad- | eager's, by graphs alone: strict mode raises |
| check, statistics, views, frozen parameters       | where eager PyTorch runs                     |
| several sizes, more than there are graphs for     | the same; eager PyTorch beyond               |
| autocast, Functions, numbers that change          | eager PyTorch, after one warning             |
| random numbers, what is read and written, inputs  | an error for this call, eager PyTorch later  |
| that are gone, captures of AOTAutograd            |                                              |
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from models import module_with
from roads import ROADS, Applies
from torch import nn

import torch_ort
from torch_ort.capture import second_graphs
from torch_ort.fallback import FallbackWarning

AGAIN = "gradients are differentiated again, which a captured graph cannot do"


@pytest.fixture
def fallbacks_allowed(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")


needs_eager = pytest.mark.usefixtures("fallbacks_allowed")


@pytest.fixture(params=sorted(ROADS))
def road(request):
    return ROADS[request.param]


def rows(*sizes: int, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=requires_grad)


def critic() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)
    ).double()


def pair(module: nn.Module, road) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Give an eager copy, ours, and the module whose parameters ours has."""
    return copy.deepcopy(module), road(module), module


def penalty(call, x: torch.Tensor) -> torch.Tensor:
    """Give the gradient penalty of a Wasserstein GAN."""
    (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return (gradient.norm(2, dim=1) - 1).square().mean()


def assert_same_gradients(want: nn.Module, got: nn.Module) -> None:
    for (name, a), b in zip(want.named_parameters(), got.parameters(), strict=True):
        if a.grad is None:
            assert b.grad is None, name
            continue
        torch.testing.assert_close(b.grad, a.grad, msg=lambda words, n=name: f"{n}: {words}")


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return call()


def test_a_gradient_penalty_trains_as_in_eager(road):
    eager, ours, module = pair(critic(), road)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (eager, module)]
    batches = [(rows(5, 6, requires_grad=False), rows(5, 6)) for _ in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for real, between in batches:
            losses = []
            for call, optimizer in zip((eager, ours), optimizers, strict=True):
                optimizer.zero_grad()
                loss = -call(real).mean() + 10 * penalty(call, between)
                loss.backward()
                losses.append(loss)
            torch.testing.assert_close(losses[1], losses[0])
            assert_same_gradients(eager, module)
            for optimizer in optimizers:
                optimizer.step()
    assert not [each for each in caught if each.category is FallbackWarning]
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["recordings_handed_over"] == 0
    # The call of real samples, that between them, and its gradients.
    assert counters["graphs_captured"] == 3


@needs_eager
def test_eager_runs_what_no_graph_can_after_one_warning(road):
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    eager, ours, module = pair(module, road)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = rows(4, 6)
            for call in (eager, ours):
                with torch.autocast("cpu", torch.bfloat16):
                    penalty(call, x).backward()
    told = [each for each in caught if each.category is FallbackWarning]
    assert len(told) == 1
    assert AGAIN in str(told[0].message)
    assert told[0].filename == __file__
    assert torch_ort.counters()["fallbacks_backward"] == 1
    assert_same_gradients(eager, module)


@needs_eager
def test_calls_of_another_kind_go_on_in_the_engine(road):
    eager, ours, _ = pair(critic(), road)
    real = rows(5, 6, requires_grad=False)
    ours(real).sum().backward()
    x = rows(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        quietly(lambda: penalty(ours, x).backward())
    before = torch_ort.counters()["forward_runs"]
    torch.testing.assert_close(ours(real), eager(real))
    assert torch_ort.counters()["forward_runs"] == before + 1
    with torch.autocast("cpu", torch.bfloat16):
        penalty(ours, rows(5, 6)).backward()  # in eager PyTorch, without another word
    assert torch_ort.counters()["forward_runs"] == before + 1
    assert torch_ort.counters()["fallbacks"] == 1


def test_create_graph_alone_stays_in_the_engine(road):
    eager, ours, _ = pair(critic(), road)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            x = rows(4, 6)
            (got,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
            (want,) = torch.autograd.grad(eager(x).sum(), x)
            assert got.requires_grad
            torch.testing.assert_close(got.detach(), want)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["forward_runs"] == 3


def test_after_plain_steps(road):
    eager, ours, module = pair(critic(), road)
    for call in (eager, ours):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
        for _ in range(3):
            call(x).square().sum().backward()
        quietly(lambda call=call, x=x: penalty(call, x).backward())
    assert_same_gradients(eager, module)


def test_hessian(road):
    module = critic()
    x = rows(1, 6, requires_grad=False)
    want = torch.autograd.functional.hessian(lambda v: module(v).sum(), x)
    ours = road(module)
    got = quietly(lambda: torch.autograd.functional.hessian(lambda v: ours(v).sum(), x))
    torch.testing.assert_close(got, want)
    assert torch_ort.counters()["fallbacks"] == 0


def test_third_derivatives(road):
    call = Applies(lambda x, y: (x.sin() * y).cumsum(0).exp())
    ours = road(call)

    def third(f):
        x, y = rows_of(0.1, 0.7), rows_of(-0.4, 0.9)
        found = [f(x, y)]
        for _ in range(3):
            found += torch.autograd.grad(found[-1].sum(), [x, y], create_graph=True)
        return found

    def rows_of(low, high):
        return torch.linspace(low, high, 5, dtype=torch.float64).requires_grad_()

    for got, want in zip(quietly(lambda: third(ours)), third(call), strict=True):
        torch.testing.assert_close(got, want)


def test_gradgradcheck(road):
    ours = road(Applies(lambda x, y: F.softmax(x @ y, -1) * x.exp().sum()))
    inputs = rows(3, 4), rows(4, 2)
    assert quietly(lambda: torch.autograd.gradgradcheck(ours, inputs))


def test_inputs_that_are_made_of_one_another(road):
    """Each input counts by itself, whatever it has to do with the others outside of the graph."""
    module = Applies(lambda a, b: (a * b).tanh())
    ours = road(module)

    def run(call):
        a = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        b = a.square().exp()
        first = torch.autograd.grad(call(a, b).cos().sum(), [a, b], create_graph=True)
        return *first, *torch.autograd.grad(sum(each.square().sum() for each in first), [a])

    for got, want in zip(quietly(lambda: run(ours)), run(module), strict=True):
        torch.testing.assert_close(got, want)


def test_constants_of_the_program_stay_constants(road):
    """What `detach` and `no_grad` cut off has no second derivative either."""

    def function(x, y):
        with torch.no_grad():
            scale = x.square().mean()
        return x.pow(3) * scale + (x * y).sin() * x.detach()

    module = Applies(function)
    ours = road(module)

    def run(call):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        y = torch.linspace(2, 3, 6, dtype=torch.float64)
        (first,) = torch.autograd.grad(call(x, y).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(quietly(lambda: run(ours)), run(module))


def test_outputs_that_are_views_of_one(road):
    def function(x):
        y = x.pow(3)
        return y, y[1:], y.reshape(2, 3).t()

    module = Applies(function)
    ours = road(module)

    def run(call):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        a, b, c = call(x)
        loss = a.sin().sum() + b.square().sum() + (c * c.detach()).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(quietly(lambda: run(ours)), run(module))


def test_an_output_that_is_not_used(road):
    module = Applies(lambda x: (x.pow(3), x.exp()))
    ours = road(module)

    def run(call):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(call(x)[0].sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(quietly(lambda: run(ours)), run(module))


def test_running_statistics_are_updated_once_a_call(road):
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    eager, ours, module = pair(module, road)
    for x in (rows(5, 6), rows(5, 6)):
        for call in (eager, ours):
            quietly(lambda call=call, x=x: penalty(call, x).backward())
        assert_same_gradients(eager, module)
        for want, got in zip(eager.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(got, want)


def test_running_statistics_that_another_call_updates_in_between(road):
    """As of a discriminator that has seen real and generated images when its penalty is taken."""
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    eager, ours, module = pair(module, road)
    for _ in range(3):
        real, generated = rows(5, 6), rows(5, 6)
        for call in (eager, ours):
            first, second = call(real), call(generated)
            (gradient,) = torch.autograd.grad(first.sum(), real, create_graph=True)
            loss = second.mean() - first.mean() + gradient.square().sum()
            quietly(lambda loss=loss: loss.backward())
        assert_same_gradients(eager, module)
        for want, got in zip(eager.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(got, want)


def test_parameters_that_were_frozen_at_the_call_get_no_gradients(road):
    eager, ours, module = pair(critic(), road)
    for each in (eager, module):
        each[0].requires_grad_(False)
    x = rows(4, 6)
    values = [call(x) for call in (eager, ours)]
    for each in (eager, module):
        each[0].requires_grad_(True)
    for value in values:
        (gradient,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        quietly(lambda gradient=gradient: gradient.square().sum().backward())
    assert module[0].weight.grad is None
    assert_same_gradients(eager, module)


@needs_eager
def test_autocast_is_that_of_the_call(road):
    eager, ours, module = pair(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), road)
    x = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
    for call in (eager, ours):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x)
        (first,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        quietly(lambda first=first: first.square().sum().backward())
    assert_same_gradients_roughly(eager, module)


def assert_same_gradients_roughly(want: nn.Module, got: nn.Module) -> None:
    for a, b in zip(want.parameters(), got.parameters(), strict=True):
        if a.grad is None or b.grad is None:
            assert a.grad is None
            assert b.grad is None
            continue
        torch.testing.assert_close(b.grad, a.grad, rtol=0.05, atol=0.02)


@needs_eager
def test_random_numbers_cannot_be_drawn_again(road):
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double()
    ours = road(module)
    with pytest.raises(RuntimeError, match="double backward of this call: it draws random numbers"):
        penalty(ours, rows(4, 6)).backward()
    runs = torch_ort.counters()["forward_runs"]
    penalty(ours, rows(4, 6)).backward()  # as the message promises
    assert torch_ort.counters()["forward_runs"] == runs
    eager = copy.deepcopy(module)
    x = rows(4, 6)
    results = []
    for call in (eager, ours):
        torch.manual_seed(3)
        results.append(penalty(call, x))
    torch.testing.assert_close(results[1], results[0])


@needs_eager
def test_what_is_read_and_written_cannot_be_read_again(road):
    def forward(self, x):
        y = x.pow(3) * self.count.clone()
        self.count.add_(1)
        return y

    ours = road(module_with(forward, count=torch.ones((), dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="double backward of this call: it reads what it writes"):
        penalty(ours, rows(4, 6)).backward()
    penalty(ours, rows(4, 6)).backward()


@needs_eager
@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "edited"])
def test_inputs_that_are_gone_or_edited(road, is_gone):
    ours = road(Applies(lambda x, y: x.pow(3) + y.exp().sum()))
    x, y = rows(4, 6), rows(3, requires_grad=False)
    out = ours(x, y).sum()
    if is_gone:
        del y
        gc.collect()
    else:
        y.add_(1)
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="its inputs were freed, or were written into"):
        gradient.sum().backward()
    x, y = rows(4, 6), rows(3, requires_grad=False)
    (gradient,) = torch.autograd.grad(ours(x, y).sum(), x, create_graph=True)
    gradient.sum().backward()  # as the message promises


def test_an_edit_between_the_two_backwards(road):
    ours = road(critic())
    x = rows(4, 6)
    (gradient,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient.square().sum().backward()


def test_strict_mode_raises(road):
    ours = road(critic())
    for _ in range(2):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(RuntimeError, match="does not currently support double backward: grad"),
        ):
            penalty(ours, rows(4, 6)).backward()


def test_nothing_is_kept_for_a_second_derivative(road):
    ours = road(Applies(lambda x, y: x.exp() + y.sum()))
    x, y = rows(4, 6), rows(1000, requires_grad=False)
    freed = []
    out = ours(x, y)
    weakref.finalize(y, freed.append, True)
    del y
    gc.collect()
    assert freed
    out.sum().backward()


def test_a_module_that_has_changed_since(monkeypatch):
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double().eval()
    ours = torch_ort.ORTModule(module)
    x = rows(4, 6)
    (gradient,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    module.train()
    with pytest.raises(RuntimeError, match=r"the module was changed after its call: .*training"):
        gradient.square().sum().backward()


def test_parameters_are_put_back_and_what_forward_assigns():
    def forward(self, x):
        self.last = self.inner(x)
        return self.last * 2

    eager, ours, module = pair(module_with(forward, inner=critic(), last=None), torch_ort.ORTModule)
    weight = module.inner[0].weight
    x = rows(4, 6)
    for call in (eager, ours):
        quietly(lambda call=call: penalty(call, x).backward())
    assert_same_gradients(eager, module)
    assert module.inner[0].weight is weight
    torch.testing.assert_close(module.last, eager.last)


def test_several_sizes(road):
    eager, ours, module = pair(critic(), road)
    for n in (3, 5, 3, 1):
        x = rows(n, 6)
        for call in (eager, ours):
            penalty(call, x).backward()
        assert_same_gradients(eager, module)
    assert torch_ort.counters()["fallbacks"] == 0


@needs_eager
def test_more_sizes_than_there_are_graphs_for(road, monkeypatch):
    monkeypatch.setattr(second_graphs, "_MOST_GRAPHS", 2)
    eager, ours, module = pair(critic(), road)
    for n in (3, 5, 4, 3):
        x = rows(n, 6)
        for call in (eager, ours):
            quietly(lambda call=call, x=x: penalty(call, x).backward())
        assert_same_gradients(eager, module)
    assert torch_ort.counters()["fallbacks"] == 1


def test_layouts_of_what_is_given(road):
    """Tangents and inputs with gaps, expanded ones, and some that are not given."""
    module = Applies(lambda x, y: (x.pow(3) * y, (x * y).exp()))
    ours = road(module)

    def run(call):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)[:, ::2].requires_grad_()
        y = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4).t().requires_grad_()
        a, b = call(x, y)
        tangent = torch.ones((), dtype=torch.float64).expand(4, 3)
        found = []
        for outputs in ((a,), (a, b), (b,)):
            given = [tangent] * len(outputs)
            first = torch.autograd.grad(outputs, [x, y], given, create_graph=True)
            second = sum(each.square().sum() for each in first)
            found += [*first, *torch.autograd.grad(second, [x, y], retain_graph=True)]
        return found

    for got, want in zip(run(ours), run(module), strict=True):
        torch.testing.assert_close(got, want)


def test_tangents_that_are_differentiated(road):
    """The gradient is linear in what comes back, which has a gradient of its own."""
    module = Applies(lambda x: x.sin() * x)
    ours = road(module)

    def run(call):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        v = torch.linspace(1, 2, 6, dtype=torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(call(x), x, v, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, v])

    for _ in range(2):
        for got, want in zip(run(ours), run(module), strict=True):
            torch.testing.assert_close(got, want)


def test_later_calls_hold_their_inputs(road):
    module = Applies(lambda x, y: x.pow(3) + y.exp().sum() * x)
    ours = road(module)
    for _ in range(3):
        x, y = rows(4, 6), rows(3, requires_grad=False)
        slopes, freed = [], []
        for call in (module, ours):
            copied = y.clone()
            if call is ours:
                weakref.finalize(copied, freed.append, True)
            out = call(x, copied).sum()
            if torch_ort.counters()["graphs_captured"] > 1:
                del copied
            (first,) = torch.autograd.grad(out, x, create_graph=True)
            slopes += torch.autograd.grad(first.square().sum(), x)
            copied = None
        torch.testing.assert_close(slopes[1], slopes[0])
        del out, first, call
        gc.collect()
        assert freed
    assert torch_ort.counters()["fallbacks"] == 0


def test_several_live_calls(road):
    eager, ours, module = pair(critic(), road)
    for _ in range(2):
        xs = [rows(4, 6) for _ in range(3)]
        for call in (eager, ours):
            results = [call(x).sum() for x in xs]
            slopes = [
                torch.autograd.grad(y, x, create_graph=True)[0]
                for x, y in reversed([*zip(xs, results, strict=True)])
            ]
            (slopes[0].exp() * slopes[1] + slopes[2].square()).sum().backward(retain_graph=True)
            slopes[1].square().sum().backward()
        assert_same_gradients(eager, module)


@needs_eager
def test_functions_of_python_are_eager_pytorchs():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.pow(3)

        @staticmethod
        def backward(ctx, given):
            (x,) = ctx.saved_tensors
            return given * 3 * x.square()

    module = Applies(lambda x: Cube.apply(x.sin()).exp())
    ours = torch_ort.ORTModule(module)

    def run(call):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for _ in range(2):
        torch.testing.assert_close(quietly(lambda: run(ours)), run(module))
    assert torch_ort.counters()["fallbacks"] == 1


@needs_eager
def test_numbers_that_change(road):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = 1.0, critic()

        def forward(self, x):
            return self.inner(x * self.scale) * self.scale

    eager, ours, module = pair(Scaled(), road)
    for scale in (1.0, 0.5, 0.25, 2.0):
        eager.scale = module.scale = scale
        x = rows(4, 6)
        for call in (eager, ours):
            quietly(lambda call=call, x=x: penalty(call, x).backward())
        assert_same_gradients(eager, module)


@needs_eager
@pytest.mark.hands_over("the recorder is off")
def test_captures_of_aotautograd_say_so_once(road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    eager, ours, module = pair(critic(), road)
    x = rows(4, 6)
    (gradient,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), torch.autograd.grad(eager(x).sum(), x)[0])
    assert torch_ort.counters()["fallbacks"] == 0
    with pytest.raises(RuntimeError, match="of this call: AOTAutograd has captured it"):
        gradient.square().sum().backward()
    for call in (eager, ours):
        penalty(call, x).backward()
    assert_same_gradients(eager, module)
