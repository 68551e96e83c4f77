"""Masks, places of non-zeros, sets of values: graphs with sizes that only data tells.

The recorder takes them on both roads, forward and backward.
"""

from __future__ import annotations

import copy

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F
from torch_ort._C import Unsupported

import torch_ort
from tests.roads import ROADS
from torch_ort.fallback import FallbackWarning
from torch_ort.rules.symbols import expression_text

pytestmark = pytest.mark.ort_only


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.fill = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, x, mask):
        return self.function(self.linear(x), mask, self.fill, x)


def assigned(h, mask, fill, x):
    h[mask] = fill
    return h.square().sum()


def assigned_what_was_read(h, mask, fill, x):
    other = h.clone()
    other[mask] = h[mask].tanh() * fill
    return other.square().sum()


def assigned_a_number(h, mask, fill, x):
    h[mask] = 0.5
    return h.square().sum()


def added(h, mask, fill, x):
    return h.index_put((mask,), fill, accumulate=True).square().sum()


def sorted_out(h, mask, fill, x):
    rows = mask.flatten().nonzero().squeeze(1)
    return (h.flatten(0, 1).index_select(0, rows) * fill).square().sum()


LOSSES = {
    "assigned": assigned,
    "assigned what was read": assigned_what_was_read,
    "assigned a number": assigned_a_number,
    "added": added,
    "read": lambda h, mask, fill, x: (h[mask] * fill).square().sum(),
    "read twice": lambda h, mask, fill, x: (h[mask] * x[mask]).sum() + h[~mask].abs().sum(),
    "read along one dim": lambda h, mask, fill, x: h[:, mask.any(0)].square().sum(),
    "read beside an index": lambda h, mask, fill, x: h[0][mask[0], 1:3].square().sum(),
    "mean": lambda h, mask, fill, x: F.mse_loss(h[mask], x[mask]),
    "selected": lambda h, mask, fill, x: h.masked_select(mask[..., None]).square().mean(),
    "scattered": lambda h, mask, fill, x: (
        h.masked_scatter(mask[..., None], x * fill).square().sum()
    ),
    "of a row's norm": lambda h, mask, fill, x: F.layer_norm(h[mask], (8,), fill).square().sum(),
    "cross-entropy of some": lambda h, mask, fill, x: F.cross_entropy(
        h[mask], x[mask].argmax(-1), reduction="sum"
    ),
    "places": sorted_out,
    "values": lambda h, mask, fill, x: h.sum() * mask.long().cumsum(1).unique().sum(),
    "counts of values": lambda h, mask, fill, x: (
        h.sum() * torch.unique(mask.sum(1), return_counts=True)[1].max()
    ),
    "runs": lambda h, mask, fill, x: (
        h.sum() * torch.unique_consecutive(mask.flatten().long(), return_inverse=True)[1].sum()
    ),
    "histogram": lambda h, mask, fill, x: h.sum() * torch.bincount(mask.flatten().long()).max(),
    "repeated": lambda h, mask, fill, x: (
        h.flatten(0, 1).repeat_interleave(mask.flatten().long(), 0).square().sum()
    ),
}
# All rows, some, one, none.
SHARES = (1.1, 0.6, 0.3, 0.05, -1.0)


def steps(model, call, share_of_rows=SHARES, dtype=torch.float32):
    seen = []
    for step, share in enumerate(share_of_rows):
        torch.manual_seed(step)
        x, mask = torch.randn(4, 5, 8, dtype=dtype), torch.rand(4, 5) < share
        model.zero_grad()
        loss = call(x, mask)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", LOSSES)
def test_training(road, name):
    shares = SHARES[:-1] if name in ("mean", "selected", "counts of values") else SHARES
    torch.manual_seed(0)
    model = Model(LOSSES[name])
    eager = copy.deepcopy(model)
    got = steps(model, ROADS[road](model), shares)
    torch.testing.assert_close(got, steps(eager, eager, shares), rtol=1e-4, atol=1e-5)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["graph_breaks"] == 0
    assert counters["graphs_captured"] == 1
    assert counters["backward_runs"] == len(shares)


def test_equal_masks_have_equal_sizes():
    """A loss of chosen rows, with the choice written out for predictions and for targets."""
    model = Model(
        lambda h, mask, fill, x: F.mse_loss(
            h[mask & (x[..., 0] > 0)], x[mask & (x[..., 0] > 0)], reduction="sum"
        )
    )
    eager = copy.deepcopy(model)
    got = steps(model, torch_ort.ORTModule(model))
    torch.testing.assert_close(got, steps(eager, eager), rtol=1e-4, atol=1e-5)
    assert torch_ort.counters()["graphs_captured"] == 1


@pytest.mark.hands_over("two sizes are not known to be equal")
def test_masks_of_what_is_written_in_between_are_two(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def function(h, mask, fill, x):
        y = x.clone()
        first = (h[y > 0] * 2).sum()
        y.add_(0.5)
        return first + (h[y > 0] * 3).sum()

    model = Model(function)
    eager = copy.deepcopy(model)
    got = steps(model, torch_ort.ORTModule(model))
    torch.testing.assert_close(got, steps(eager, eager), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("road", ROADS)
def test_doubles(road):
    model = Model(LOSSES["read"]).double()
    eager = copy.deepcopy(model)
    got = steps(model, ROADS[road](model), dtype=torch.float64)
    torch.testing.assert_close(
        got, steps(eager, eager, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("road", ROADS)
def test_results_have_sizes_of_data(road):
    model = Model(lambda h, mask, fill, x: (h[mask], mask.nonzero(), h.masked_select(h > 0)))
    call = ROADS[road](model)
    for share in SHARES:
        x, mask = torch.randn(4, 5, 8), torch.rand(4, 5) < share
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                got, want = call(x, mask), model(x, mask)
            torch.testing.assert_close(got, want)
            assert [each.stride() for each in got] == [each.stride() for each in want]


@pytest.mark.parametrize("road", ROADS)
def test_two_calls_alive_at_once_have_sizes_of_their_own(road):
    model = Model(LOSSES["read"])
    eager = copy.deepcopy(model)
    call = ROADS[road](model)
    inputs = [(torch.randn(4, 5, 8), torch.rand(4, 5) < share) for share in (0.2, 0.8)]
    for run, of in ((call, model), (eager, eager)):
        losses = [run(*given) for given in inputs]
        losses[0].backward()
        losses[1].backward()
        assert of.fill.grad is not None
    torch.testing.assert_close(model.fill.grad, eager.fill.grad)
    torch.testing.assert_close(model.linear.weight.grad, eager.linear.weight.grad)


def as_long_as_values(h, mask, fill, x):
    values = (x * 3).unique()
    return F.cosine_similarity(values, x.mean((-1, 0), keepdim=True)[0], 0), (x * 3).isclose(x)


def beside_an_unread_selection(h, mask, fill, x):
    y = x.clamp(max=x)
    y[y > 0].reshape(1, -1)
    return y.exp()


def by_the_number_of_selected(h, mask, fill, x):
    y = x * 3
    ones = fill.new_ones(()).expand(y[mask].shape[0])
    return y.exp() / (ones.sum() + 1)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    "function", [as_long_as_values, beside_an_unread_selection, by_the_number_of_selected]
)
def test_what_has_a_size_of_data_runs_after_what_gives_it(function, road):
    """It reads nothing of that, so that only the size keeps it behind."""
    model = Model(function)
    call = ROADS[road](model)
    for share in SHARES:
        x, mask = torch.randn(4, 5, 8), torch.rand(4, 5) < share
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                torch.testing.assert_close(call(x, mask), model(x, mask))
    assert torch_ort.counters()["fallbacks"] == 0


class DividedBySelected(torch.autograd.Function):
    """Backward divides by the number of positive elements."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ones = x.new_ones(()).expand(x[x > 0].shape[0])
        return gradient / (ones.sum() + 1)


def deep_and_divided(h, fill):
    """Give a loss whose backward has something to recompute."""
    for _ in range(4):
        h = F.softplus(h @ h.mT @ h * fill).sin()
    return DividedBySelected.apply(h.tanh()).sum()


@pytest.mark.hands_over("Dynamo keeps the function as an operator that takes graphs")
@pytest.mark.parametrize("road", ROADS)
def test_sizes_of_data_are_given_in_time_in_a_backward_within_a_budget(road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_MEMORY_BUDGET", "0.9")
    model = Model(lambda h, mask, fill, x: deep_and_divided(h, fill))
    eager = copy.deepcopy(model)
    call = ROADS[road](model)
    torch.testing.assert_close(steps(model, call), steps(eager, eager), rtol=1e-4, atol=1e-5)
    assert torch_ort.counters()["fallbacks"] == 0


# What asks whether anything was selected, or how much, in forms that Dynamo takes in several ways.
ASKING = {
    "numel": lambda h, y: y.sum() if y.numel() else h.mean(),
    "not numel": lambda h, y: h.mean() if not y.numel() else y.sum(),
    "length": lambda h, y: y.sum() if len(y) else h.mean(),
    "a size": lambda h, y: y.sum() if y.shape[0] else h.mean(),
    "a comparison": lambda h, y: y.mean() if y.shape[0] > 1 else h.mean(),
    "and": lambda h, y: y.sum() if y.numel() and y.shape[0] < 3 else h.mean(),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_branch_on_how_much_is_selected_breaks_the_graph(name, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    torch.manual_seed(0)
    model = Model(lambda h, mask, fill, x: ASKING[name](h, h[mask]))
    eager = copy.deepcopy(model)
    with pytest.warns(FallbackWarning, match="runs in eager PyTorch"):
        got = steps(model, torch.compile(model, backend="ort"))
    torch.testing.assert_close(got, steps(eager, eager), rtol=1e-4, atol=1e-5)
    assert torch_ort.counters()["fallbacks"] == 0


WITHOUT_ELEMENTS = {
    "max": lambda y: y.max(),
    "min": lambda y: y.min(),
    "max of more": lambda y: (y * 2).exp().max() + y.sum(),
    "max of integers": lambda y: y.argmax(-1).max() + y.sum(),
    "amax": lambda y: y.amax(),
    "amin of columns": lambda y: y.amin(0).sum(),
    "max of columns": lambda y: y.max(0).values.sum(),
    "argmax": lambda y: y.argmax() + y.sum(),
    "aminmax": lambda y: torch.aminmax(y).max,
    "first": lambda y: y[0].sum(),
    "inf norm": lambda y: y.norm(float("inf")),
    "k-th": lambda y: y.kthvalue(1, 0).values.sum(),
    "topk": lambda y: y.topk(1, 0).values.sum(),
    "quantile": lambda y: y.quantile(0.5),
}


@pytest.mark.hands_over("PyTorch's code for some of these asks for the size")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_reductions_of_nothing_raise(name, road):
    torch.manual_seed(0)
    model = Model(lambda h, mask, fill, x: WITHOUT_ELEMENTS[name](h[mask]))
    call = ROADS[road](model)
    x, mask = torch.randn(4, 5, 8), torch.rand(4, 5) < 0.5
    torch.testing.assert_close(call(x, mask), model(x, mask))
    for each in (model, call):
        with pytest.raises((RuntimeError, IndexError), match="") as raised:
            each(x, mask & False)
        assert not isinstance(raised.value, torch_ort.Unsupported)
    torch.testing.assert_close(call(x, mask), model(x, mask))
    assert torch_ort.counters()["fallbacks"] == 0


def test_a_size_is_compared_with_a_number_beyond_64_bits():
    """PyTorch asserts of some sizes of data that they are below its largest unsigned integer."""
    size = sympy.Symbol("u2", integer=True)
    for bound, want in ((2**64 - 4, 2**63 - 1), (-(2**64), 1 - 2**63), (7, 7)):
        text = expression_text(sympy.Le(size, bound, evaluate=False))
        assert text == f"(u2) <= ({want})"
    with pytest.raises(Unsupported, match="want a number of 64 bits"):
        expression_text(sympy.Add(size, 2**64, evaluate=False))
