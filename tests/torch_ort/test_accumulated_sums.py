"""Sums of products that are one tensor, to which each product is added where it is."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import assert_as_exact_as_eager, gradients, plan_of
from torch import nn

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.ort_only


class Recurrent(nn.Module):
    """A GRU cell in a loop over the tokens of [batch, tokens, width], and a head of one number."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        state = torch.tanh(x[:, 0])
        scores = []
        for token in x.unbind(1):
            state = self.cell(token, state)
            scores.append(self.head(state))
        return torch.cat(scores, 1)


class Projections(nn.Module):
    """What queries, keys and values of [batch, tokens, width] are projected from, three times."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        query, key, value = (layer(x) for layer in self.layers)
        return torch.softmax(query @ key.transpose(1, 2), -1) @ value


class Pairs(nn.Module):
    """The products of all pairs of tokens of [batch, tokens, width], as recommenders have."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        x = self.layer(x)
        return torch.sigmoid(x @ x.transpose(1, 2))


@pytest.fixture(autouse=True)
def clean(monkeypatch) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")


def rewrites(programs) -> list[int]:
    return [count for name, count, _ in programs[0].passes if name == "accumulate_sums"]


# Of the recurrent model: two weights of the cell in four tokens, and the weight of the head, whose
# products of one column PyTorch computes.
@pytest.mark.parametrize(
    ("make", "count"),
    [(Recurrent, [9]), (Projections, [2]), (Pairs, [1])],
    ids=["recurrent", "projections", "pairs"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_training_against_float64(make, count, dtype) -> None:
    model = make().to(dtype)
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    with watchers.watching() as programs:
        assert_as_exact_as_eager(model, compiled, torch.randn(3, 4, 24, dtype=dtype))
    assert rewrites(programs) == count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [Recurrent, Projections, Pairs])
def test_short_floats_are_as_near_as_eager(make, dtype) -> None:
    model = make().to(dtype)
    x = torch.randn(3, 4, 24).to(dtype)
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    with watchers.watching() as programs:
        got = gradients(compiled, x)
    assert rewrites(programs)[0] > 0
    exact = gradients(copy.deepcopy(model).double(), x.double())
    for mine, eager, truth in zip(got, gradients(model, x), exact, strict=True):
        bound = 1.5 * (eager.double() - truth).abs().max() + 1e-3 * truth.abs().max()
        assert mine.dtype == dtype
        assert (mine.double() - truth).abs().max() <= bound


@pytest.mark.parametrize("size", [(1, 3, 24), (2, 1, 24), (50, 2, 24)], ids=str)
@pytest.mark.parametrize("make", [Recurrent, Projections, Pairs])
def test_sizes(make, size) -> None:
    model = make()
    assert_as_exact_as_eager(model, torch.compile(copy.deepcopy(model), backend="ort"),
                             torch.randn(size))  # fmt: skip


@pytest.mark.parametrize("make", [Recurrent, Projections, Pairs])
def test_an_empty_batch(make) -> None:
    compiled = torch.compile(make(), backend="ort")
    result, *found = gradients(compiled, torch.zeros(0, 3, 24))
    assert result.numel() == 0
    assert all(not gradient.any() for gradient in found)


def test_many_batches_through_one_graph() -> None:
    model = Projections()
    call = torch_ort.ORTModule(copy.deepcopy(model))
    for size in [(3, 4, 24), (1, 9, 24), (5, 2, 24)]:
        assert_as_exact_as_eager(model, call, torch.randn(size))
    assert torch_ort.counters()["graphs_captured"] == 1


def turned(y, w):
    return y.t() @ w + y


def added_to_itself(y, w):
    return torch.addmm(y, y, w)


def added_to_the_right_factor(y, w):
    return torch.addmm(y, w, y)


@pytest.mark.parametrize("call", [turned, added_to_itself, added_to_the_right_factor])
def test_a_factor_that_is_also_the_start(call) -> None:
    """A product is not written over numbers that it still reads as a factor."""

    def chain(x, w):
        return call(x @ w, w).relu()

    x, w = torch.randn(300, 300), torch.randn(300, 300)
    with torch.no_grad():
        got = torch.compile(chain, backend="ort")(x, w)
    want = chain(x.double(), w.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)


def test_one_tensor_serves_a_sum(monkeypatch) -> None:
    model, x = Recurrent(128), torch.randn(2, 8, 128)

    together = plan_of(model, x)["peak_bytes"]
    monkeypatch.setenv("TORCH_ORT_DISABLE", "accumulate_sums")
    # Without it, the eight products of a weight are alive when they are added.
    weight = 3 * 128 * 128 * 4
    assert together <= plan_of(model, x)["peak_bytes"] - 4 * weight


@pytest.mark.parametrize("settings", [{"disable": ["products"]}, {"emulate_eager_casts": True}])
def test_sums_stay_where_bits_are_to_be_eagers(settings) -> None:
    compiled = torch.compile(Projections(), backend="ort", options=settings)
    with watchers.watching() as programs:
        gradients(compiled, torch.randn(3, 4, 24))
    assert rewrites(programs) == []
