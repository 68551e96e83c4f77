"""Attention in its forms, and rotary position embeddings.

Tensors of heads are (batch, heads, length, features).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import MICROSOFT, Dims, dtype_of, of_onnx


def to_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (batch, length, heads · features) to heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise UserError unless heads of keys and values serve as many of queries each.

    PyTorch's kernels divide by their number without a look at it.
    """
    for heads in (key.shape[1], value.shape[1]):
        if heads == 0 or query.shape[1] % heads != 0:
            raise _C.UserError(
                f"attention: heads of keys and values: got {key.shape[1]}, {value.shape[1]}, want"
                f" numbers that divide the queries' {query.shape[1]}"
            )


def from_heads(x: Tensor) -> Tensor:
    """Reshape heads to (batch, length, heads · features)."""
    return x.transpose(1, 2).flatten(2)


@dataclass
class Mask:
    """What queries may look at: a bool tensor, and numbers that are added to scores."""

    allowed: Tensor | None = None
    bias: Tensor | None = None

    def allow(self, where: Tensor) -> None:
        """Allow no more than where a bool tensor is true."""
        self.allowed = where if self.allowed is None else self.allowed & where

    def joined(self, dtype: torch.dtype) -> Tensor | None:
        """Give one tensor, as PyTorch's kernels take it."""
        if self.allowed is None or self.bias is None:
            return self.allowed if self.bias is None else self.bias.to(dtype)
        return self.bias.to(dtype).masked_fill(~self.allowed, -math.inf)


def _positions(
    query: Tensor, key: Tensor, past: int | torch.SymInt, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Give the positions of queries and of keys, to be compared with each other."""
    queries = torch.arange(query.shape[2], device=query.device).unsqueeze(1)
    offset = past if lengths is None else (lengths - query.shape[2]).view(-1, 1, 1, 1)
    return queries + offset, torch.arange(key.shape[2], device=query.device)


@of_onnx("Attention")
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    past_key: Tensor | None = None, past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None, *, is_causal: int = 0, kv_num_heads: int = 0,
    q_num_heads: int = 0, left_window_size: int = -1, right_window_size: int = -1,
    qk_matmul_output_mode: int = 0, scale: float | None = None, softcap: float = 0.0,
    softmax_precision: int = 0, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Attend with queries to keys and values; gives result, keys, values, and scores.

    Queries, keys and values are tensors of heads, or (batch, length, heads · features). A head of
    keys may serve several heads of queries.
    """
    is_flat = query.ndim == 3
    if is_flat:
        query, key, value = (
            to_heads(x, heads)
            for x, heads in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
        )
    past: int | torch.SymInt = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    mask = Mask()
    if attn_mask is not None:
        missing = key.shape[2] - attn_mask.shape[-1]
        is_bool = attn_mask.dtype == torch.bool
        padded = F.pad(attn_mask, (0, missing), value=0 if is_bool else -math.inf)
        if is_bool:
            mask.allow(padded)
        else:
            mask.bias = padded
    if nonpad_kv_seqlen is not None:
        lengths = nonpad_kv_seqlen.view(-1, 1, 1, 1)
        mask.allow(torch.arange(key.shape[2], device=key.device) < lengths)
    has_window = left_window_size >= 0 or right_window_size >= 0
    is_square = past_key is None and nonpad_kv_seqlen is None and attn_mask is None
    is_plain = bool(is_causal) and is_square and not has_window
    if (is_causal or has_window) and not (is_plain and _has_kernel(wanted, softcap)):
        is_plain = False
        at, keys = _positions(query, key, past, nonpad_kv_seqlen)
        if is_causal:
            mask.allow(keys <= at)
        if left_window_size >= 0:
            mask.allow(keys >= at - left_window_size)
        if right_window_size >= 0:
            mask.allow(keys <= at + right_window_size)
    check_heads(query, key, value)
    if _has_kernel(wanted, softcap) and not softmax_precision:
        result = F.scaled_dot_product_attention(
            query, key, value, mask.joined(query.dtype), is_causal=is_plain, scale=scale,
            enable_gqa=True,
        )  # fmt: skip
        scores = None
    else:
        result, scores = _attend(
            query, key, value, mask, scale, softcap, softmax_precision, qk_matmul_output_mode
        )
    return from_heads(result) if is_flat else result, key, value, scores


def _has_kernel(wanted: tuple[bool, ...], softcap: float) -> bool:
    """Tell whether PyTorch's kernels compute it: they neither cap scores nor give them."""
    return not softcap and not (len(wanted) > 3 and wanted[3])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, softcap: float,
    precision: int, mode: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend step by step; gives the result, and the scores of a mode of ONNX's."""
    if key.shape[1] != query.shape[1]:
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    # Each operand by the root, so that no product overflows which the scale would bring back.
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    steps = [(query * root) @ (key * root).transpose(-1, -2)]
    steps.append(softcap * torch.tanh(steps[0] / softcap) if softcap else steps[0])
    scores = steps[1] if mask.bias is None else steps[1] + mask.bias
    if mask.allowed is not None:
        scores = scores.masked_fill(~mask.allowed, -math.inf)
    steps.append(scores)
    # A query that may look at nothing: its weights are 0, and so are its gradients.
    is_blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_blind, 0).softmax(
        -1, dtype_of(precision) if precision else None
    )
    steps.append(weights.masked_fill(is_blind, 0).to(query.dtype))
    return steps[3] @ value, steps[mode]


@of_onnx("LinearAttention")
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, past_state: Tensor | None = None,
    decay: Tensor | None = None, beta: Tensor | None = None, *, q_num_heads: int,
    kv_num_heads: int, scale: float = 0.0, update_rule: str = "gated_delta", chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend through a state that each position updates; gives the result and the last state.

    With keys k, values v, a decay g and a rate b, a position makes S of the state:
    exp(g) S + b k (v - (exp(g) S)ᵀ k) for "gated_delta"; "gated" lacks the subtraction and b,
    "delta" the decay, and "linear" both.
    """
    is_gated = update_rule in ("gated", "gated_delta")
    is_delta = update_rule in ("delta", "gated_delta")
    if (is_gated and decay is None) or (is_delta and beta is None):
        raise _C.UserError(f"LinearAttention: {update_rule}: got too few inputs")
    length = query.shape[1]
    query, key, value = (
        to_heads(query, q_num_heads), to_heads(key, kv_num_heads), to_heads(value, kv_num_heads)
    )  # fmt: skip
    scale = scale or query.shape[-1] ** -0.5
    state = past_state
    if state is None:
        state = query.new_zeros(key.shape[0], kv_num_heads, key.shape[-1], value.shape[-1])
    if is_gated and decay is not None:
        decay = to_heads(decay, kv_num_heads).exp()  # of each feature of keys, or of the head
    if is_delta and beta is not None:
        beta = beta.transpose(1, 2).unsqueeze(-1)
    shared = q_num_heads // kv_num_heads
    results = []
    for i in range(length):
        k, v = key[:, :, i].unsqueeze(-1), value[:, :, i].unsqueeze(-2)
        if is_gated and decay is not None:
            state = state * decay[:, :, i].unsqueeze(-1)
        if is_delta and beta is not None:
            v = beta[:, :, i].unsqueeze(-1) * (v - k.transpose(-1, -2) @ state)
        state = state + k * v
        of_queries = state.repeat_interleave(shared, 1)
        results.append(scale * (query[:, :, i].unsqueeze(-2) @ of_queries))
    result = from_heads(torch.cat(results, 2)) if results else from_heads(query * value[..., :0])
    return result, state


# ---- rotary position embeddings


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, dim: int) -> Tensor:
    """Rotate pairs of the first `dim` features; cos and sin are (..., length, dim / 2)."""
    turned, rest = x[..., :dim], x[..., dim:]
    if is_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    one, other = cos * first - sin * second, sin * first + cos * second
    if is_interleaved:
        turned = torch.stack([one, other], -1).flatten(-2)
    else:
        turned = torch.cat([one, other], -1)
    return torch.cat([turned, rest], -1)


@of_onnx("RotaryEmbedding")
def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *,
    interleaved: int = 0, num_heads: int = 0, rotary_embedding_dim: int = 0,
) -> Tensor:  # fmt: skip
    """Rotate pairs of features by the angle of their position.

    x is a tensor of heads, or (batch, length, heads · features). Cosines and sines are given for
    all positions, (positions, features / 2), beside the positions, or without these for each token.
    """
    heads = to_heads(x, num_heads) if x.ndim == 3 else x
    if position_ids is not None:
        cos, sin = F.embedding(position_ids, cos), F.embedding(position_ids, sin)
    dim = rotary_embedding_dim or heads.shape[-1]
    turned = _rotated(heads, cos.unsqueeze(1), sin.unsqueeze(1), bool(interleaved), dim)
    return from_heads(turned) if x.ndim == 3 else turned


@of_onnx("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding_of_ort(
    x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, *, interleaved: int = 0,
    num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0,
    is_packed_batching: int = 0,
) -> Tensor:  # fmt: skip
    """Rotate as ONNX's operator does; positions may be one number, that of the first token."""
    # Its documents say that the scale is used, and its kernels do not use it.
    _expect("RotaryEmbedding", is_packed_batching=(is_packed_batching, 0), scale=(scale, 1))
    if x.ndim == 3 and not num_heads:
        num_heads = x.shape[-1] // (2 * cos.shape[-1])
    if position_ids.ndim < 2:
        length = x.shape[1] if x.ndim == 3 else x.shape[2]
        position_ids = position_ids.reshape(1, 1) + torch.arange(length, device=x.device)
        position_ids = position_ids.expand(x.shape[0], length)
    return rotary_embedding(
        x, cos, sin, position_ids, interleaved=interleaved, num_heads=num_heads,
        rotary_embedding_dim=rotary_embedding_dim,
    )  # fmt: skip


# ---- attention of ONNX Runtime
#
# Where files are read, these functions run on the meta device, to give the sizes of their results.
# What masks and biases have as sizes is not looked at there: the number of all keys has a name of
# its own in most files, and that it is the sum of others is only known in a call.


def _expect(name: str, **facts: tuple[Any, Any]) -> None:
    """Refuse what a function does not compute: of each fact, what the node has and what it may."""
    for what, (found, expected) in facts.items():
        if found != expected:
            raise _C.Unsupported(f"{name}: {what}: got {found}, want {expected}")


def _expect_none(name: str, **inputs: Tensor | None) -> None:
    """Refuse inputs that a function does not look at."""
    for what, given in inputs.items():
        if given is not None:
            raise _C.Unsupported(f"{name}: {what}: got one, want none")


def _expect_both(name: str, **inputs: Tensor | None) -> None:
    """Refuse the one of two inputs that say nothing alone."""
    missing = [what for what, given in inputs.items() if given is None]
    if len(missing) == 1:
        raise _C.UserError(f"{name}: {' and '.join(inputs)}: got no {missing[0]}, want both")


def _counting_keys(
    mask: Tensor | None, query: Tensor, length: int | torch.SymInt, past: int | torch.SymInt,
    name: str, ranks: Sequence[int],
) -> Tensor | None:  # fmt: skip
    """Give where keys count; None where all do.

    A mask has ones where keys count, (batch, keys) or (batch, queries, keys), or (batch, 1, most
    keys, most keys) for all queries that the past may have had. With one dim, it has the number of
    keys that count of each row, and behind these perhaps the numbers of keys before them, or places
    in rows that are joined without their padding, which rows with padding have no use for.
    """
    if mask is None:
        return None
    if mask.ndim not in ranks:
        raise _C.Unsupported(f"{name}: got rank {mask.ndim}, want {ranks[0]} to {ranks[-1]}")
    if mask.is_meta:
        return None
    if mask.ndim == 1:
        batch = query.shape[0]
        if mask.shape[0] == 3 * batch + 2:
            mask = mask[:batch]
        ends, *starts = mask.view(-1, batch, 1, 1, 1).unbind()
        if len(starts) > 1:
            raise _C.Unsupported(
                f"{name}: got {mask.shape[0]} numbers for a batch of {batch}, want {batch}, "
                f"{2 * batch} or {3 * batch + 2}"
            )
        keys = torch.arange(length, device=mask.device)
        return (keys < ends) & (keys >= starts[0]) if starts else keys < ends
    if mask.ndim == 2 and mask.shape[1] == 1 and length != 1:
        return None  # a mask of all keys at once moves all scores of a query, which changes nothing
    if mask.ndim == 4:
        mask = mask[:, :, past : past + query.shape[2], :length]
    counts = mask > 0
    while counts.ndim < 4:
        counts = counts.unsqueeze(1)
    return counts


def _pushed(
    query: Tensor, key: Tensor, counts: Tensor | None, bias: Tensor | None, filter_value: float,
    past: int | torch.SymInt, is_causal: bool,
) -> Mask:  # fmt: skip
    """Give the mask of ONNX Runtime's operators, which push scores down in place of leaving out.

    Keys that do not count lose a number, and those behind a query get the lowest of all. The last
    query looks at all keys, also where there are more of these than queries.
    """
    if query.is_meta:
        return Mask()
    lowest = torch.finfo(query.dtype).min
    added = query.new_zeros(())
    if counts is not None:
        added = added.masked_fill(~counts, max(filter_value, lowest))
    if is_causal:
        at, keys = _positions(query, key, past, None)
        is_hidden = (keys > at) & (at < past + query.shape[2] - 1)
        added = added.masked_fill(is_hidden, lowest)
    if counts is None and not is_causal:
        return Mask(bias=bias)
    return Mask(bias=added if bias is None else bias + added)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None
) -> Tensor:
    check_heads(query, key, value)
    return F.scaled_dot_product_attention(
        query, key, value, mask.joined(query.dtype), scale=scale or None, enable_gqa=True
    )


@of_onnx("Attention", domain=MICROSOFT)
def attention_of_ort(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, mask_index: Tensor | None = None,
    past: Tensor | None = None, attention_bias: Tensor | None = None,
    past_sequence_length: Tensor | None = None, *, num_heads: int, unidirectional: int = 0,
    qkv_hidden_sizes: tuple[int, ...] = (), scale: float = 0.0, mask_filter_value: float = -10000.0,
    do_rotary: int = 0, rotary_embedding_dim: int = 0, past_present_share_buffer: int = 0,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Project tokens to queries, keys and values, and attend; gives keys and values, too.

    Past and present are (2, batch, heads, length, features).
    """
    _expect(
        "Attention", do_rotary=(do_rotary, 0),
        past_present_share_buffer=(past_present_share_buffer, 0),
    )  # fmt: skip
    projected = x @ weights if bias is None else x @ weights + bias
    sizes = list(qkv_hidden_sizes) or [projected.shape[-1] // 3] * 3
    query, key, value = (to_heads(part, num_heads) for part in projected.split(sizes, -1))
    before: int | torch.SymInt = 0
    if past is not None:
        before = past.shape[3]
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    present = None
    if len(wanted) > 1 and wanted[1]:
        if key.shape[-1] != value.shape[-1]:
            raise _C.Unsupported(
                f"Attention: present: got {value.shape[-1]} features of values, want "
                f"{key.shape[-1]}, as keys have"
            )
        present = torch.stack([key, value])
    counts = _counting_keys(
        mask_index, query, key.shape[2], before, "Attention: mask_index", range(1, 5)
    )
    mask = _pushed(
        query, key, counts, attention_bias, mask_filter_value, before, bool(unidirectional)
    )
    return from_heads(_by_kernel(query, key, value, mask, scale)), present


@of_onnx("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
    bias: Tensor | None = None, key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None, past_key: Tensor | None = None,
    past_value: Tensor | None = None, past_sequence_length: Tensor | None = None,
    cache_indirection: Tensor | None = None, *, num_heads: int, scale: float = 0.0,
    unidirectional: int = 0, mask_filter_value: float = -10000.0, wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Attend with projected queries; gives the result, keys, values, and masked scores.

    Queries are (batch, length, heads · features). Keys and values are the same, or heads; both may
    be packed into keys, (batch, length, heads, 2, features), and all three into queries.
    """
    _expect_none(
        "MultiHeadAttention", past_sequence_length=past_sequence_length,
        cache_indirection=cache_indirection,
    )  # fmt: skip
    _expect_both("MultiHeadAttention", past_key=past_key, past_value=past_value)
    if query.ndim == 5:
        query, key, value = (part.flatten(2) for part in query.unbind(3))
    elif key is not None and key.ndim == 5:
        key, value = (part.flatten(2) for part in key.unbind(3))
    if key is None or value is None:
        raise _C.UserError("MultiHeadAttention: key and value: got one or none, want both")
    if bias is not None:
        width = query.shape[-1]
        query = query + bias[:width]
        if key.ndim == 3:
            key, value = key + bias[width : 2 * width], value + bias[2 * width :]
    query = to_heads(query, num_heads)
    if key.ndim == 3:
        key, value = to_heads(key, num_heads), to_heads(value, num_heads)
    past: int | torch.SymInt = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    counts = _counting_keys(
        key_padding_mask, query, key.shape[2], past, "MultiHeadAttention: key_padding_mask",
        range(1, 4),
    )  # fmt: skip
    mask = _pushed(
        query, key, counts, attention_bias, mask_filter_value, past, bool(unidirectional)
    )
    if len(wanted) > 3 and wanted[3]:
        result, scores = _attend(query, key, value, mask, scale or None, 0.0, 0, 2)
        return from_heads(result), key, value, scores
    return from_heads(_by_kernel(query, key, value, mask, scale)), key, value, None


def _types_of_group_query_attention(*inputs: Any, **named: Any) -> list[tuple[Any, Dims]]:
    result, *present = group_query_attention(*inputs, **named)[:3]
    has_past = len(inputs) > 3 and inputs[3] is not None
    types: list[tuple[Any, Dims]] = [(result.dtype, list(result.shape))]
    for x in present:
        # The larger one of two sizes: of which one is larger, trials know nothing.
        batch, heads, length, width = x.shape
        types.append((x.dtype, [batch, heads, None if has_past else length, width]))
    return types


@of_onnx(
    "GroupQueryAttention", domain=MICROSOFT, numbers=(6,), types=_types_of_group_query_attention
)
def group_query_attention(
    query: Tensor, key: Tensor | None, value: Tensor | None, past_key: Tensor | None,
    past_value: Tensor | None, seqlens_k: Tensor, total_sequence_length: Sequence[int],
    cos_cache: Tensor | None = None, sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None, attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None, k_norm_weight: Tensor | None = None,
    query_seqlens: Tensor | None = None, *, num_heads: int, kv_num_heads: int, scale: float = 0.0,
    softcap: float = 0.0, local_window_size: int = -1, causal: int = 1, do_rotary: int = 0,
    rotary_interleaved: int = 0, smooth_softmax: int = -1, qk_output: int = 0,
    sliding_window_cache: int = 0, k_quant_type: str = "NONE", v_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0, qk_norm_epsilon: float = 1e-6, q_norm_epsilon: float = 1e-6,
    k_norm_epsilon: float = 1e-6, wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    """Attend causally, where a head of keys serves several of queries; gives keys and values too.

    Queries are (batch, length, heads · features), and may have keys and values behind them.
    `seqlens_k` is the last position of each row, of all that come before and of the new ones, and
    the total the largest number of positions. The past is as long as what comes before, or has
    space for the new ones: these stand behind what the row has had.
    """
    name = "GroupQueryAttention"
    _expect_none(
        name, k_scale=k_scale, v_scale=v_scale, q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight, query_seqlens=query_seqlens,
    )  # fmt: skip
    _expect(
        name, qk_output=(qk_output, 0), sliding_window_cache=(sliding_window_cache, 0),
        k_quant_type=(k_quant_type, "NONE"), v_quant_type=(v_quant_type, "NONE"),
        kv_cache_bit_width=(kv_cache_bit_width, 0), outputs=(max(len(wanted), 3), 3),
    )  # fmt: skip
    if local_window_size == 0 or (local_window_size > 0 and not causal):
        raise _C.Unsupported(
            f"{name}: local_window_size: got {local_window_size} and causal {causal}, want -1, or "
            f"more than 0 and causal 1"
        )
    _expect_both(name, key=key, value=value)
    _expect_both(name, past_key=past_key, past_value=past_value)
    if key is None or value is None:
        width = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        parts = [num_heads * width, kv_num_heads * width, kv_num_heads * width]
        query, key, value = query.split(parts, -1)
    query, key, value = (
        to_heads(query, num_heads), to_heads(key, kv_num_heads), to_heads(value, kv_num_heads)
    )  # fmt: skip
    (total,) = total_sequence_length
    length, past = query.shape[2], 0 if past_key is None else past_key.shape[2]
    if not query.is_meta and total != past + length and not length <= total <= past:
        raise _C.UserError(
            f"{name}: total_sequence_length: got {total}, want {past + length}, or from {length} "
            f"to {past} where the past has space"
        )
    last = seqlens_k.view(-1, 1)  # (batch, 1), as the numbers of positions before the new ones
    before = (last + 1 - length).clamp(min=0)
    at = before + torch.arange(length, device=query.device)
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise _C.UserError(f"{name}: do_rotary: got no cosines and sines")
        if position_ids is None:
            position_ids = at
        elif length == total:  # of a prompt, they give the place of the first token alone
            first = position_ids.flatten()[:1]
            position_ids = first + torch.arange(length, device=query.device).expand_as(at)
        cos, sin = (F.embedding(position_ids, x).unsqueeze(1) for x in (cos_cache, sin_cache))
        query, key = (
            _rotated(x, cos, sin, bool(rotary_interleaved), 2 * cos.shape[-1]) for x in (query, key)
        )
    if past_key is not None and past_value is not None:
        size = torch.sym_max(total, past)
        key = _placed_behind(past_key, key, before, size)
        value = _placed_behind(past_value, value, before, size)
    mask = Mask()
    keys = torch.arange(key.shape[2], device=query.device)
    last, at = last.view(-1, 1, 1, 1), at.view(at.shape[0], 1, length, 1)
    at = torch.minimum(at, last)  # what is behind the end of a row looks at what its last one does
    mask.allow(keys <= (at if causal else last))
    if local_window_size > 0:
        mask.allow(keys > at - local_window_size)
    if attention_bias is not None and not query.is_meta:
        mask.bias = F.pad(attention_bias, (0, key.shape[2] - total))
    results = (key, value)
    if head_sink is None and smooth_softmax == 1:
        head_sink = query.new_zeros(num_heads)
    if head_sink is not None:
        key, value, mask = _with_sink(query, key, value, mask, head_sink)
    if softcap:
        result, _ = _attend(query, key, value, mask, scale or None, softcap, 0, 0)
    else:
        result = _by_kernel(query, key, value, mask, scale)
    return from_heads(result), *results, None


def _placed_behind(past: Tensor, new: Tensor, before: Tensor, size: int | torch.SymInt) -> Tensor:
    """Place what is new of each row behind the first ones of the past, and zeros behind that."""
    places = torch.arange(size, device=new.device)
    length = new.shape[2]
    has_past, has_any = places < before, places < before + length
    among_new = (past.shape[2] + places - before).clamp(max=past.shape[2] + length - 1)
    source = torch.where(has_past, places, among_new)[:, None, :, None]
    both = torch.cat([past, new], 2)
    found = both.gather(2, source.expand(-1, both.shape[1], -1, both.shape[3]))
    return found.masked_fill(~has_any[:, None, :, None], 0)


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, sink: Tensor
) -> tuple[Tensor, Tensor, Mask]:
    """Give one more key and value of zeros: it takes its share of each query, and gives nothing.

    Its score is 0, to which the mask adds the number of each head.
    """
    if mask.bias is None:
        mask.bias = query.new_zeros(1, 1, 1, 1)
    bias = mask.bias.to(query.dtype).expand(-1, query.shape[1], -1, -1)
    if mask.allowed is not None:
        bias = bias.masked_fill(~mask.allowed, -math.inf)
    sinks = sink.to(query.dtype).view(1, -1, 1, 1).expand(bias.shape[0], -1, query.shape[2], 1)
    key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return key, value, Mask(bias=torch.cat([bias, sinks], -1))
