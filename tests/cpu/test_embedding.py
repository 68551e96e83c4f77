"""The gradient of an embedding by the engine's own kernel, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
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
