"""The gradient of an embedding by the engine's own kernel, against eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import plan_of
from torch import nn
from torch.nn import functional as F

import torch_ort


def gradient(call, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weight = weight.clone().requires_grad_()
    (call(weight, ids).sin() * 3).sum().backward()
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0,)], ids=str)
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_against_eager(dtype, shape, padding):
    def embed(weight, ids):
        return F.embedding(ids, weight, padding_idx=padding)

    weight, ids = torch.randn(11, 6, dtype=dtype), torch.randint(0, 11, shape)
    want = gradient(embed, weight, ids)
    got = gradient(torch.compile(embed, backend="ort"), weight, ids)
    torch.testing.assert_close(got, want)


def test_it_is_the_engines_kernel():
    layer = nn.Embedding(10, 4)
    graph = torch_ort.explain(layer, torch.randint(0, 10, (3, 5))).graphs[0]
    assert graph.nodes["torch_ort.EmbeddingGrad"] == 1
    assert "aten::embedding_dense_backward" not in graph.aten


def test_frequency_scaling_stays_with_pytorch():
    layer = nn.Embedding(10, 4, scale_grad_by_freq=True)
    graph = torch_ort.explain(layer, torch.randint(0, 10, (3, 5))).graphs[0]
    assert graph.aten["aten::embedding_dense_backward"] == 1


@pytest.mark.parametrize("view", ["expanded", "transposed", "strided"])
def test_gradients_of_any_layout(view):
    def embed(weight, ids):
        return F.embedding(ids, weight)

    weight, ids = torch.randn(11, 6), torch.randint(0, 11, (4, 5))
    grad = {
        "expanded": torch.randn(4, 1, 1).expand(4, 5, 6),
        "transposed": torch.randn(6, 5, 4).permute(2, 1, 0),
        "strided": torch.randn(4, 5, 12)[..., ::2],
    }[view]
    results = []
    for call in (embed, torch.compile(embed, backend="ort")):
        leaf = weight.clone().requires_grad_()
        call(leaf, ids).backward(grad)
        results.append(leaf.grad)
    torch.testing.assert_close(results[1], results[0])


def test_ids_of_any_layout_and_any_number():
    call = torch.compile(lambda weight, ids: F.embedding(ids, weight), backend="ort")
    for rows, columns in ((3, 5), (4, 9), (7, 2)):
        weight, ids = torch.randn(11, 6), torch.randint(0, 11, (columns, rows)).t()
        want = gradient(lambda weight, ids: F.embedding(ids, weight), weight, ids)
        torch.testing.assert_close(gradient(call, weight, ids), want)


def test_same_bits_for_any_number_of_threads():
    def embed(weight, ids):
        return F.embedding(ids, weight)

    weight, ids = torch.randn(5000, 64), torch.randint(0, 50, (4000,))
    call, before, results = torch.compile(embed, backend="ort"), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(gradient(call, weight, ids))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


# ---- sums that the gradient of an embedding is added to


class Tied(nn.Module):
    """A language model whose table of embeddings is the weight of its last layer."""

    def __init__(
        self, words: int = 31, width: int = 12, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(words, width, padding_idx=3, dtype=dtype)
        self.layer = nn.Linear(width, width, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.layer(self.table(ids))), self.table.weight)


class ReadTwice(Tied):
    """The table is read by two halves of a model, as T5's is."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = torch.tanh(self.layer(self.table(ids)))
        return states * self.table(ids + 1)


class Turned(Tied):
    """The rest of the table's gradient is the gradient of its transpose."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum(1) + self.table.weight.t().exp().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", [Tied, ReadTwice, Turned])
def test_sums_of_gradients_of_one_table(make, dtype, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    model = make(dtype=dtype)
    exact = copy.deepcopy(model).double()
    call = torch.compile(model, backend="ort")
    for size in ((4, 7), (1, 1), (5, 3)):
        ids = torch.randint(0, 30, size)
        for each, forward in ((model, call), (exact, exact)):
            each.zero_grad()
            result = forward(ids)
            (result * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum().backward()
        for mine, want in zip(model.parameters(), exact.parameters(), strict=True):
            if want.grad is None:
                continue
            near = 1e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(mine.grad.double(), want.grad, rtol=near, atol=near)


@pytest.mark.parametrize("make", [Tied, ReadTwice])
def test_the_gradient_is_added_where_the_sum_is(make):
    (graph,) = torch_ort.explain(make(), torch.randint(0, 30, (4, 7))).graphs
    assert [count for name, count, _ in graph.passes if name == "accumulate_sums"] == [1]


def test_a_sum_takes_one_table_of_memory(monkeypatch):
    model, ids = Tied(words=5000, width=16), torch.randint(0, 30, (2, 3))

    together = plan_of(model, ids)["peak_bytes"]
    monkeypatch.setenv("TORCH_ORT_DISABLE", "accumulate_sums")
    assert together <= plan_of(model, ids)["peak_bytes"] - 0.99 * 5000 * 16 * 4
