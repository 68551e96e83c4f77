"""Sparse gradients of embeddings: made in the engine, as sparse as in eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from roads import ROADS
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint

import torch_ort
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only
WORDS, WIDTH = 12, 8


class Words(nn.Module):
    """A table of words below a dense layer; `look_up` says how it is read."""

    def __init__(self, look_up=None, **settings) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True, **settings)
        self.head = nn.Linear(WIDTH, 3)
        self.look_up = look_up or (lambda model, ids: model.table(ids))

    def forward(self, ids):
        return self.head(self.look_up(self, ids).tanh()).square().mean()


class Bags(Words):
    def __init__(self, look_up=None, **settings) -> None:
        super().__init__(look_up)
        self.table = nn.EmbeddingBag(WORDS, WIDTH, sparse=True, **settings)


class OnlyWords(nn.Module):
    """Has no gradients but sparse ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, WIDTH, sparse=True) for _ in range(2))

    def forward(self, ids):
        first, second = (table(ids) for table in self.tables)
        return (first * second).sum(-1).sigmoid().log().mean()


class Frozen(Words):
    def __init__(self) -> None:
        super().__init__()
        self.table.requires_grad_(False)


class InHalf(Words):
    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.head(self.table(ids).tanh())
        return hidden.float().square().mean()


class Rows(nn.Module):
    """Gathers numbers of a table, whose gradient is sparse too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = (nn.Parameter(torch.randn(6, WIDTH)) for _ in range(2))

    def forward(self, ids):
        index = ids % 6
        gathered = torch.gather(self.table, 0, index, sparse_grad=True)
        return (gathered * self.scale[: ids.shape[0], : ids.shape[1]]).square().mean()


def in_a_row(model, ids):
    starts = torch.arange(0, ids.numel(), ids.shape[1])
    return model.table(ids.flatten(), starts)


def weighted(model, ids):
    return model.table(ids, per_sample_weights=ids.float().cos())


def tied(model, ids):
    return model.table(ids) @ model.table.weight.T @ model.table.weight


def from_inside(model, ids):
    """Looks up what only the graph knows."""
    return model.table((model.table(ids) @ model.table.weight.detach().T).argmax(-1))


MODELS = {
    "embedding": Words,
    "padding": lambda: Words(padding_idx=0),
    "read twice": lambda: Words(lambda model, ids: model.table(ids) + model.table(ids.flip(-1))),
    "read three times": lambda: Words(
        lambda model, ids: model.table(ids) * model.table(ids[:1]) + model.table(ids % 3)
    ),
    "read by a dense layer too": lambda: Words(tied),
    "ids that the graph makes": lambda: Words(from_inside),
    "function": lambda: Words(lambda model, ids: F.embedding(ids, model.table.weight, sparse=True)),
    "checkpoint": lambda: Words(
        lambda model, ids: checkpoint.checkpoint(model.table, ids, use_reentrant=False)
    ),
    "sums of bags": lambda: Bags(mode="sum"),
    "means of bags": lambda: Bags(mode="mean"),
    "bags with padding": lambda: Bags(mode="sum", padding_idx=1),
    "bags in a row": lambda: Bags(in_a_row, mode="mean"),
    "weighted bags": lambda: Bags(weighted, mode="sum"),
    "only sparse ones": OnlyWords,
    "frozen": Frozen,
    "gather": Rows,
    "autocast": InHalf,
}  # fmt: skip
CLOSE = {"autocast": {"rtol": 2e-2, "atol": 2e-3}}  # where not as close as float32 is
both_roads = pytest.mark.parametrize("road", ROADS)


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (3 + step % 2, 4), generator=torch.Generator().manual_seed(step))


def optimizers_of(model):
    sparse = [p for p in model.parameters() if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    made = [torch.optim.SparseAdam(sparse, 1e-2)] if sparse else []
    return [*made, torch.optim.SGD([*sparse, *dense], 0.1)]


def assert_like(got, want, rtol=1e-4, atol=1e-5) -> None:
    assert (got is None) == (want is None)
    if want is None:
        return
    assert got.layout == want.layout
    if want.is_sparse:
        assert got.is_coalesced() == want.is_coalesced()
        assert got._nnz() == want._nnz()
        assert got.sparse_dim() == want.sparse_dim()
    torch.testing.assert_close(got.to_dense(), want.to_dense(), rtol=rtol, atol=atol)


def compare_gradients(model, eager, **close) -> None:
    for mine, right in zip(model.parameters(), eager.parameters(), strict=True):
        assert_like(mine.grad, right.grad, **close)


def pair(make, road):
    torch.manual_seed(0)
    eager = make()
    model = copy.deepcopy(eager)
    return eager, model, ROADS[road](model)


def assert_in_engine(count) -> None:
    counters = torch_ort.counters()
    for name in ("fallbacks", "calls_left_to_eager", "graph_breaks", "captures_refused"):
        assert counters[name] == 0, name
    assert counters["backward_runs"] == count
    assert counters["steps_python"] == 0


@both_roads
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.hands_over("Dynamo's graph calls an operator that takes graphs, for checkpoints")
def test_training(name, road):
    eager, model, ours = pair(MODELS[name], road)
    close = CLOSE.get(name, {"rtol": 1e-4, "atol": 1e-5})
    optimizers = []
    for step in range(4):
        for accumulated in range(2):
            ids = ids_of(step + accumulated)
            got, want = ours(ids), eager(ids)
            torch.testing.assert_close(got, want, **close)
            got.backward()
            want.backward()
            compare_gradients(model, eager, **close)
        optimizers = optimizers or [each for m in (model, eager) for each in optimizers_of(m)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if name not in CLOSE:
            torch.testing.assert_close([*model.parameters()], [*eager.parameters()])
    assert_in_engine(8)
    is_left = name == "checkpoint" and road == "compile"
    assert bool(torch_ort.counters()["recordings_handed_over"]) == is_left


@both_roads
def test_gradients_are_asked_for(road):
    eager, model, ours = pair(Words, road)
    (got,) = torch.autograd.grad(ours(ids_of(0)), [model.table.weight])
    (want,) = torch.autograd.grad(eager(ids_of(0)), [eager.table.weight])
    assert_like(got, want)
    assert model.table.weight.grad is None


@both_roads
@pytest.mark.parametrize("option", [{}, {"early_gradients": True}])
def test_hooks_see_them(road, option):
    eager, model, _ = pair(Words, road)
    ours = (
        torch.compile(model, backend="ort", options=option)
        if road == "compile" else torch_ort.ORTModule(model)
    )  # fmt: skip
    seen = []
    for each in (model, eager):
        each.table.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
        each.table.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    ours(ids_of(0)).backward()
    eager(ids_of(0)).backward()
    assert len(seen) == 4
    for got, want in zip(seen[:2], seen[2:], strict=True):
        assert_like(got, want)


@both_roads
def test_a_graph_is_kept(road):
    eager, model, ours = pair(Words, road)
    for call in (ours, eager):
        loss = call(ids_of(1))
        loss.backward(retain_graph=True)
        loss.backward()
    compare_gradients(model, eager)


@both_roads
def test_some_outputs_have_no_gradient(road):
    class Two(Words):
        def forward(self, ids):
            return self.table(ids).tanh(), self.head(self.table(ids + 1)).square()

    eager, model, ours = pair(lambda: Two(), road)
    for which in (0, 1, 1, 0):
        for call in (ours, eager):
            call(ids_of(0) % 10)[which].sum().backward()
        compare_gradients(model, eager)
    assert_in_engine(4)


@both_roads
def test_rows_of_the_gradient_are_no_memory_of_the_engine(road):
    _, model, ours = pair(Words, road)
    ours(ids_of(0)).backward()
    gradient = model.table.weight.grad
    before = gradient.to_dense().clone()
    for step in range(3):
        torch.autograd.grad(ours(ids_of(step)), [*model.parameters()])
    torch.testing.assert_close(gradient.to_dense(), before, rtol=0, atol=0)


@both_roads
def test_what_a_graph_makes_of_them_else_runs_in_eager(road, monkeypatch):
    """A table that forward computes gets a sparse gradient, with which autograd goes on."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    make = lambda: Words(  # noqa: E731
        lambda model, ids: F.embedding(ids, model.table.weight * 2, sparse=True)
    )
    eager, model, ours = pair(make, road)
    with pytest.warns(
        FallbackWarning, match=r"the sparse gradient of an embedding is an argument of aten\.mul"
    ):
        ours(ids_of(0)).backward()
    eager(ids_of(0)).backward()
    compare_gradients(model, eager)


@both_roads
def test_gradients_of_gradients(road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, model, ours = pair(Words, road)
    for each, call in ((model, ours), (eager, eager)):
        (gradient,) = torch.autograd.grad(call(ids_of(0)), [each.head.weight], create_graph=True)
        gradient.square().sum().backward()
    compare_gradients(model, eager)
