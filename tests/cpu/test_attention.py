"""Attention and its gradients by the engine's own kernels, against eager PyTorch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.ort_only

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_heads(
    queries: int, keys: int, features: int, dtype: torch.dtype = torch.float32,
    batch: int = 2, heads: int = 3,
) -> Heads:  # fmt: skip
    """Give query, key and value as a projection leaves them: heads beside each other in memory."""
    torch.manual_seed(0)
    return tuple(
        torch.randn(batch, length, heads, features, dtype=dtype).transpose(1, 2)
        for length in (queries, keys, keys)
    )


def run(call, heads: Heads, **settings) -> list[torch.Tensor]:
    """Give the result and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in heads]
    result = call(*leaves, **settings)
    torch.manual_seed(1)
    result.backward(torch.randn(result.shape, dtype=torch.float64).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def check(heads: Heads, isa: str = "", loosen: float = 1, **settings) -> None:
    """Compare with PyTorch's own formula in float64."""
    torch._dynamo.reset()
    attend = torch.compile(attention, backend="ort", options={"isa": isa})
    got = run(attend, heads, **settings)
    if settings.get("mask") is not None:
        settings["mask"] = settings["mask"].double()
    want = run(plain_attention, tuple(tensor.double() for tensor in heads), **settings)
    for mine, exact, like in zip(got, want, [heads[0], *heads], strict=True):
        scale = exact.abs().max().item() if exact.numel() else 0
        tolerance = TOLERANCE[mine.dtype] * max(scale, 1) * loosen
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=tolerance)
        assert mine.dtype == like.dtype


def attention(query, key, value, mask=None, causal=False, scale=None):
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )


def plain_attention(query, key, value, mask=None, causal=False, scale=None):
    scores = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    if mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ value


SIZES = [
    (1, 1, 1), (4, 4, 16), (7, 13, 20), (48, 48, 32), (49, 97, 33), (130, 130, 64), (5, 300, 8),
    (150, 60, 24),
]  # fmt: skip


@pytest.mark.parametrize("isa", _C.isa_names())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_eager(size, dtype, isa):
    check(make_heads(*size, dtype=dtype), isa)


@pytest.mark.parametrize("isa", _C.isa_names())
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_causal(size, isa):
    check(make_heads(*size), isa, causal=True)


@pytest.mark.parametrize("length", [1024, 1500])
def test_long(length):
    check(make_heads(length, length, 16, batch=1, heads=2), causal=True)


@pytest.mark.parametrize("shape", [(1, 1, 1, 53), (2, 1, 1, 53), (37, 53), (2, 3, 37, 53)], ids=str)
def test_masks_that_are_added(shape):
    mask = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -math.inf)
    mask[..., 0] = 0  # each query sees a key
    check(make_heads(37, 53, 20), mask=mask)


def test_mask_of_any_layout():
    mask = torch.randn(53, 37).t()
    check(make_heads(37, 53, 20), mask=mask)


def test_scale():
    check(make_heads(9, 9, 8), scale=0.3)


INFERENCE = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"scale": 0.4},
    "numbers": {"mask": torch.randn(37, 37)},
    "numbers_of_heads": {"mask": torch.randn(2, 3, 37, 37)},
    "hidden_keys": {"mask": torch.rand(2, 1, 1, 37) < 0.7},
    "hidden_pairs": {"mask": torch.rand(37, 37) < 0.7},
    "seen_by_none": {"mask": torch.arange(37)[:, None] > torch.zeros(37)},
}


def kernels_of(call, heads: Heads, **settings) -> set[str]:
    """Name the attention operators of a call without gradients."""
    with torch.no_grad():
        result = torch_ort.profile(call, *heads, steps=1, **settings)
    return {step.op for step in result.steps if step.kind == "attention"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", INFERENCE)
def test_without_gradients(form, mode, dtype):
    heads, settings = make_heads(37, 37, 24, dtype=dtype), dict(INFERENCE[form])
    wide = dict(settings)
    mask = settings.get("mask")
    if mask is not None and mask.dtype != torch.bool:
        settings["mask"] = mask.to(dtype)
        wide["mask"] = settings["mask"].double()
    call = torch.compile(attention, backend="ort", fullgraph=True)
    with mode():
        got, theirs = call(*heads, **settings), attention(*heads, **settings)
        exact = attention(*(x.double() for x in heads), **wide)
    assert (got.dtype, got.stride()) == (theirs.dtype, theirs.stride())
    error, of_theirs = ((x.double() - exact).abs().max() for x in (got, theirs))
    assert error <= 2 * of_theirs + 16 * torch.finfo(dtype).eps
    assert torch_ort.counters()["fallbacks"] == 0


def test_inference_has_the_engines_kernel():
    assert kernels_of(attention, make_heads(16, 16, 8)) == {"torch_ort.Attention"}
    assert kernels_of(attention, make_heads(16, 40, 8)) == {"torch_ort.Attention"}
    (few,) = kernels_of(attention, make_heads(1, 40, 8))
    assert few.startswith("aten::")


def test_inference_of_any_length():
    call = torch.compile(attention, backend="ort", dynamic=True)
    with torch.no_grad():
        for queries, keys in [(9, 9), (20, 33), (4, 7), (1, 12)]:
            heads = make_heads(queries, keys, 8)
            torch.testing.assert_close(call(*heads), attention(*heads))
    assert torch_ort.counters()["fallbacks"] == 0


def test_queries_that_see_nothing_are_eagers():
    heads = make_heads(4, 6, 8)
    mask = torch.zeros(4, 6)
    mask[2] = -math.inf
    got = run(torch.compile(attention, backend="ort"), heads, mask=mask)
    want = run(attention, heads, mask=mask)
    torch.testing.assert_close(got[0], want[0])
    assert not got[0][:, :, 2].any()
    assert all(gradient.isfinite().all() for gradient in got[1:])
    assert not got[1][:, :, 2].any()


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_special_numbers_spread_as_in_eager(which, value):
    heads = make_heads(5, 5, 8)
    heads[which][0, 1, 2, 3] = value
    got = run(torch.compile(attention, backend="ort"), heads)
    want = run(plain_attention, heads)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_large_scores_do_not_overflow():
    heads = make_heads(6, 6, 8)
    check((heads[0] * 100, heads[1], heads[2]), loosen=10)  # scores of 100 have 1e-5 to spare


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_queries_and_no_keys(lengths):
    heads = make_heads(*lengths, 8)
    got = run(torch.compile(attention, backend="ort"), heads)
    want = run(attention, heads)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_lengths_that_change():
    torch._dynamo.reset()
    attend = torch.compile(attention, backend="ort", dynamic=True)
    for length in (5, 64, 33, 128):
        heads = make_heads(length, length, 16)
        got, want = (run(call, heads, causal=True) for call in (attend, attention))
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch_ort.counters()["fallbacks"] == 0


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Give a copy with features far apart."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("lay", [torch.Tensor.contiguous, packed], ids=["contiguous", "transposed"])
def test_layouts(lay):
    check(tuple(lay(tensor) for tensor in make_heads(21, 34, 24)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_queries_that_share_keys(key_heads, causal):
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    heads = (make_heads(33, 33, 16, heads=6)[0], *make_heads(33, 33, 16, heads=key_heads)[1:])
    got = run(torch.compile(attend, backend="ort"), heads)
    want = run(attend, tuple(tensor.double() for tensor in heads))
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def test_one_tensor_for_query_key_and_value():
    x = make_heads(9, 9, 8)[0]
    results = []
    for call in (attention, torch.compile(attention, backend="ort")):
        leaf = x.detach().requires_grad_()
        call(leaf, leaf, leaf).sin().sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    heads = make_heads(60, 60, 32, dtype=dtype)
    attend = torch.compile(attention, backend="ort")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(attend, heads, causal=True))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.0)

    def forward(self, x):
        return self.mix(x, x, x, need_weights=False)[0]


def test_the_engines_kernels_run_in_training():
    graph = torch_ort.explain(Block(), torch.randn(2, 10, 32, requires_grad=True)).graphs[0]
    assert graph.nodes["torch_ort.Attention"] == graph.nodes["torch_ort.AttentionGrad"] == 1
    assert not any("attention" in name for name in graph.aten)


SHORT_SIZES = [(1, 1, 1), (6, 6, 8), (50, 33, 20), (7, 130, 64), (128, 128, 64), (0, 3, 4)]


@pytest.mark.parametrize("isa", _C.isa_names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "wide_mask", "expanded_mask"])
def test_short_floats_are_no_worse_than_eager(kind, dtype, isa):
    """Numbers are wide between reading and writing: errors are at most those of PyTorch."""
    torch._dynamo.reset()
    attend = torch.compile(attention, backend="ort", dynamic=True, options={"isa": isa})
    for queries, keys, features in SHORT_SIZES:
        if kind == "causal" and queries > keys:
            continue
        heads = make_heads(queries, keys, features, dtype=dtype)
        settings = {"causal": kind == "causal"}
        if "mask" in kind:
            wide = torch.float32 if kind == "wide_mask" else dtype
            mask = torch.randn(2, 1, queries, 1 if kind == "expanded_mask" else keys).to(wide)
            settings["mask"] = mask.expand(-1, -1, -1, keys)
        got, eager = run(attend, heads, **settings), run(attention, heads, **settings)
        if "mask" in kind:
            settings["mask"] = settings["mask"].double()
        exact = run(plain_attention, tuple(tensor.double() for tensor in heads), **settings)
        for mine, theirs, truth in zip(got, eager, exact, strict=True):
            assert mine.dtype == dtype
            if not truth.numel():
                continue
            unit = torch.finfo(dtype).eps * truth.abs().max()
            error = (theirs.double() - truth).abs().max()
            assert (mine.double() - truth).abs().max() <= error + unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_run_in_the_engines_kernels(dtype):
    x = torch.randn(2, 10, 32, dtype=dtype, requires_grad=True)
    graph = torch_ort.explain(Block().to(dtype), x).graphs[0]
    assert graph.nodes["torch_ort.Attention"] == graph.nodes["torch_ort.AttentionGrad"] == 1
    assert not any("attention" in name for name in graph.aten)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wide_mask_over_short_scores(dtype):
    def attend(query, key, value, mask):
        scores = query @ key.transpose(-1, -2) / 4 + mask
        return scores.softmax(-1).to(dtype) @ value

    heads = make_heads(20, 33, 16, dtype=dtype)
    mask = torch.randn(2, 1, 20, 33)
    graph = torch_ort.explain(attend, *(head.requires_grad_() for head in heads), mask).graphs[0]
    assert graph.nodes["torch_ort.Attention"] == graph.nodes["torch_ort.AttentionGrad"] == 1
    eager = run(attend, heads, mask=mask)
    got = run(torch.compile(attend, backend="ort"), heads, mask=mask)
    exact = run(plain_attention, tuple(head.double() for head in heads), mask=mask.double())
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        unit = torch.finfo(dtype).eps * truth.abs().max()
        error = (theirs.double() - truth).abs().max()
        assert (mine.double() - truth).abs().max() <= error + unit


def test_saved_graphs_hold_pytorchs_operators(tmp_path):
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "step")}
    run(torch.compile(attention, backend="ort", options=options), make_heads(6, 6, 8))
    files = sorted(tmp_path.iterdir())
    assert files
    for file in files:
        assert b"AttentionGrad" not in file.read_bytes()
