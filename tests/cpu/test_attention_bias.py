"""Attention with an added mask that is learned, such as a bias for relative positions."""

from __future__ import annotations

import math
import platform

import pytest
import torch
from comparison import plan_of
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.ort_only

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 3e-3}
if platform.machine() == "aarch64":  # whose vectors have four numbers, so that sums are longer
    TOLERANCE[torch.float32] = 3e-6
SIZES = [(1, 2, 1), (4, 4, 16), (7, 13, 20), (48, 48, 32), (49, 97, 33), (130, 60, 64)]
# Shapes of the bias, from the sizes of batch, heads, queries and keys.
SHAPES = {
    "all": lambda b, h, q, k: (b, h, q, k),
    "shared by the batch": lambda b, h, q, k: (1, h, q, k),
    "without a batch": lambda b, h, q, k: (h, q, k),
    "shared by the heads": lambda b, h, q, k: (q, k),
    "of keys": lambda b, h, q, k: (b, 1, 1, k),
    "of heads": lambda b, h, q, k: (h, 1, 1),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")


def operands(
    queries: int, keys: int, features: int, dtype: torch.dtype = torch.float32, shape: str = "all"
) -> list[Tensor]:
    """Give query, key and value of two batches of three heads, and a bias."""
    torch.manual_seed(0)
    heads = [torch.randn(2, n, 3, features).transpose(1, 2) for n in (queries, keys, keys)]
    bias = torch.randn(SHAPES[shape](2, 3, queries, keys))
    return [each.to(dtype) for each in (*heads, bias)]


def in_words(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
    return (scores + bias).softmax(-1) @ value


def of_pytorch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, bias)


def batched(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Have batch and heads in one dim."""
    query, key, value, bias = (each.flatten(0, 1) for each in (query, key, value, bias))
    scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(query.shape[-1])
    return torch.bmm((scores + bias).softmax(-1), value)


def gradients(call, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    result = call(*leaves)
    torch.manual_seed(1)
    result.backward(torch.randn(result.shape, dtype=torch.float64).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def check(call, inputs: list[Tensor], isa: str = "") -> None:
    got = gradients(torch.compile(call, backend="ort", options={"isa": isa}), inputs)
    want = gradients(call, [each.double() for each in inputs])
    for mine, exact in zip(got, want, strict=True):
        assert mine.dtype == inputs[0].dtype
        atol = TOLERANCE[mine.dtype] * max(exact.abs().max().item(), 1)
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=atol)


def is_fused(call, inputs: list[Tensor]) -> bool:
    leaves = [each.detach().requires_grad_() for each in inputs]
    (graph,) = torch_ort.explain(call, *leaves).graphs
    assert graph.nodes["torch_ort.AttentionGrad"] == graph.nodes["torch_ort.Attention"]
    return graph.nodes["torch_ort.Attention"] > 0


@pytest.mark.parametrize("isa", _C.isa_names())
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size, isa) -> None:
    check(in_words, operands(*size), isa)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", [in_words, of_pytorch])
def test_shapes_of_the_bias(call, shape) -> None:
    inputs = operands(50, 37, 16, shape=shape)
    check(call, inputs)
    assert is_fused(call, inputs)


def test_batch_and_heads_in_one_dim() -> None:
    check(batched, operands(50, 37, 16))
    assert is_fused(batched, operands(50, 37, 16))


@pytest.mark.parametrize("call", [in_words, of_pytorch])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes(dtype, call) -> None:
    check(call, operands(33, 33, 16, dtype))


@pytest.mark.parametrize("attention", [in_words, of_pytorch])
def test_autocast(attention) -> None:
    """The products are of bfloat16, and the bias and its gradient of float32."""

    def call(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(*inputs)

    inputs = operands(33, 33, 16)
    got = gradients(torch.compile(call, backend="ort"), inputs)
    eager = gradients(call, inputs)
    exact = gradients(in_words, [each.double() for each in inputs])
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype
        bound = 1.5 * (theirs.double() - truth).abs().max() + 1e-3 * truth.abs().max()
        assert (mine.double() - truth).abs().max() <= bound


class Encoder(nn.Module):
    """Layers that share one bias for the distance of two places, as T5's do."""

    def __init__(self, width: int = 24, heads: int = 3, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.drop = heads, drop
        self.distances = nn.Embedding(16, heads)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))

    def forward(self, x: Tensor, is_word: Tensor) -> Tensor:
        batch, length, _ = x.shape
        places = torch.arange(length)
        distances = (places[:, None] - places).abs().clamp(max=15)
        bias = self.distances(distances).permute(2, 0, 1)[None]
        hidden = torch.zeros(is_word.shape, dtype=x.dtype)
        bias = bias + hidden.masked_fill(~is_word, -math.inf)[:, None, None]
        for layer in self.layers:
            parts = layer(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*parts, bias, dropout_p=self.drop, scale=1.0)
            x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x


@pytest.mark.parametrize("length", [5, 60])
def test_layers_that_share_a_bias(length) -> None:
    model, exact = Encoder(), Encoder().double()
    x = torch.randn(4, length, 24)
    is_word = torch.arange(length) < torch.tensor([[length], [3], [1], [length - 1]])
    compiled = torch.compile(model, backend="ort")
    for call, inputs in ((compiled, x), (exact, x.double())):
        result = call(inputs, is_word)
        (result * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum().backward()
    for mine, want in zip(model.parameters(), exact.parameters(), strict=True):
        atol = 5e-6 * want.grad.abs().max().item()
        torch.testing.assert_close(mine.grad.double(), want.grad, rtol=0, atol=atol)


def test_no_matrix_of_scores_is_saved(monkeypatch) -> None:
    call = (Encoder(), torch.randn(4, 100, 24), torch.ones(4, 100, dtype=torch.bool))
    fused = plan_of(*call)["saved_bytes"]
    monkeypatch.setenv("TORCH_ORT_DISABLE", "fuse_attention")
    probabilities = 4 * 3 * 100 * 100 * 4
    assert fused <= plan_of(*call)["saved_bytes"] - 1.9 * probabilities


def test_dropout_draws_one_mask_for_both_halves() -> None:
    """The result is linear in the values: the gradient of one shows the weights that were kept."""
    query, key, value, bias = operands(20, 20, 8)
    value = torch.eye(20).expand(2, 3, 20, 20)

    def call(query, key, value, bias):
        return F.scaled_dot_product_attention(query, key, value, bias, dropout_p=0.4)

    compiled = torch.compile(call, backend="ort")
    leaves = [each.detach().requires_grad_() for each in (query, key, value, bias)]
    kept = compiled(*leaves)
    gradient = torch.randn_like(kept)
    kept.backward(gradient)
    doubles = [each.detach().double().requires_grad_() for each in (query, key, value, bias)]
    scores = doubles[0] @ doubles[1].transpose(2, 3) / math.sqrt(8) + doubles[3]
    result = scores.softmax(-1) * (kept != 0) / 0.6 @ doubles[2]
    result.backward(gradient.double())
    torch.testing.assert_close(kept.double(), result, rtol=1e-5, atol=1e-5)
    for mine, want in zip(leaves, doubles, strict=True):
        torch.testing.assert_close(mine.grad.double(), want.grad, rtol=1e-4, atol=1e-5)


def test_queries_that_see_nothing() -> None:
    inputs = operands(9, 7, 8)
    inputs[3][0, :, 4] = -math.inf
    for call in (in_words, of_pytorch):
        got = gradients(torch.compile(call, backend="ort"), inputs)
        for mine, theirs in zip(got, gradients(call, inputs), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_many_lengths_through_one_graph() -> None:
    model = Encoder()
    call = torch_ort.ORTModule(Encoder())
    for length in (5, 17, 9):
        x, is_word = torch.randn(2, length, 24), torch.ones(2, length, dtype=torch.bool)
        for each in (model, call):
            each.zero_grad()
            each(x, is_word).square().sum().backward()
        for mine, want in zip(call.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-4)
    assert torch_ort.counters()["graphs_captured"] == 1
