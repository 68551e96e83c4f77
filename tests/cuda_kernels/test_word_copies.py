"""Concatenations of many dims, and other copies, are made 16 bytes at once on GPUs."""

from __future__ import annotations

import pytest
import torch

import torch_ort

pytestmark = pytest.mark.cuda

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64]


def number(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator) * 3
    return (found > 0 if dtype == torch.bool else found).to(dtype).cuda()


def check(function, *given: torch.Tensor, in_words: bool = True) -> None:
    compiled = torch.compile(function, backend="ort", fullgraph=True)
    compiled(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = compiled(*given)
    ran = {event.key for event in profile.key_averages()}
    assert ("aten::cat" not in ran) == in_words
    want = function(*given)
    assert got.stride() == want.stride()
    assert torch.equal(got.cpu(), want.cpu())
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 2, 4])
def test_parts_of_five_dims(dtype, dim):
    """Along the last dim a part of 16 elements begins where the one before it ends."""
    given = [number((2, 3, 2, 4, 16), dtype, seed) for seed in range(3)]
    check(lambda *parts: torch.cat(parts, dim), *given)


@pytest.mark.parametrize(("last", "in_words"), [(16, True), (12, False), (5, False)])
def test_sizes_that_are_no_words(last, in_words):
    given = [number((2, 3, 2, 4, last), torch.bfloat16, seed) for seed in range(2)]
    check(lambda *parts: torch.cat(parts, 4), *given, in_words=in_words)


def test_four_dims():
    given = [number((3, 2, 4, 16), torch.bfloat16, seed) for seed in range(2)]
    check(lambda *parts: torch.cat(parts, 1), *given, in_words=False)


def test_permuted_parts():
    given = [number((2, 4, 3, 2, 16), torch.bfloat16, seed) for seed in range(3)]
    check(lambda *parts: torch.cat([x.transpose(1, 2) for x in parts], 3), *given)


def test_parts_that_begin_anywhere():
    """Slices of a tensor whose first element stands at no multiple of 16 bytes."""
    whole = number((2, 3, 2, 4, 40), torch.bfloat16, 0)
    check(lambda x: torch.cat([x[..., 1:17], x[..., 8:24]], 0), whole)


def test_empty_parts():
    given = [
        number((2, 3, 2, 4, 16), torch.bfloat16, 0),
        number((2, 3, 0, 4, 16), torch.bfloat16, 1),
    ]
    check(lambda *parts: torch.cat(parts, 2), *given)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("columns", [128, 36])
def test_transposed_copies(dtype, columns):
    """The copy of 36 columns of bytes takes no words; complex doubles are words themselves."""
    x = number((16, 96, 64, columns), dtype, 0)

    def copied(x):
        return x.transpose(1, 2).contiguous()

    compiled = torch.compile(copied, backend="ort", fullgraph=True)
    assert torch.equal(compiled(x).cpu(), copied(x).cpu())
    assert compiled(x).stride() == copied(x).stride()


def test_heads_that_share_keys():
    """Copies of a tensor that is broadcast."""
    x = number((4, 8, 1, 128, 64), torch.bfloat16, 0)

    def shared(x):
        return x.expand(4, 8, 4, 128, 64).reshape(4, 32, 128, 64)

    got = torch.compile(shared, backend="ort", fullgraph=True)(x)
    assert got.stride() == shared(x).stride()
    assert torch.equal(got.cpu(), shared(x).cpu())


@pytest.mark.hands_over("an argument has a conjugate bit")
def test_conjugates_are_computed():
    x = number((16, 96, 64, 128), torch.complex64, 0).conj()

    def copied(x):
        return x.transpose(1, 2).contiguous()

    got = torch.compile(copied, backend="ort", fullgraph=True)(x)
    assert torch.equal(got.resolve_conj().cpu(), copied(x).resolve_conj().cpu())


def test_gradients_of_queries_keys_and_values():
    """As attention takes them apart: one matrix of three times the width gets three gradients."""

    def attend(x, weight):
        query, key, value = (x @ weight).view(2, 8, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind()
        return torch.nn.functional.scaled_dot_product_attention(query, key, value).square().sum()

    given = [number(shape, torch.float32, 0) / 8 for shape in ((2, 8, 64), (64, 192))]
    found = []
    for call in (torch.compile(attend, backend="ort", fullgraph=True), attend):
        leaves = [x.clone().requires_grad_() for x in given]
        call(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
