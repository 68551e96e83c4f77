"""Operators that shift and scale by statistics."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort.onnx.functions.table import MICROSOFT, has_attribute, of_onnx


def _along_channels(x: Tensor, values: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 2))


@of_onnx("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalize each channel of each sample (batch, channels, ...)."""
    # Not torch.nn.functional's, which refuses channels of one element.
    return torch.instance_norm(
        x, scale, bias, None, None, True, 0.0, epsilon, torch.backends.cudnn.enabled
    )


@of_onnx("BatchNormalization", when=has_attribute("training_mode", 1))
def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalize by the statistics of the batch; gives the running ones too.

    They keep the share `momentum`, and the variance is that of the batch, not an estimate.
    """
    axes = [axis for axis in range(x.ndim) if axis != 1]
    # Not torch.nn.functional's, which refuses channels of one element.
    result = torch.batch_norm(
        x, scale.to(x.dtype), bias.to(x.dtype), None, None, True, 0.0, epsilon,
        torch.backends.cudnn.enabled,
    )  # fmt: skip
    with torch.no_grad():
        batch_var, batch_mean = torch.var_mean(x.to(mean.dtype), axes, correction=0)
        return (
            result,
            mean * momentum + batch_mean * (1 - momentum),
            var * momentum + batch_var * (1 - momentum),
        )


@of_onnx("LRN")
def local_response_norm(
    x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    """X / (bias + alpha / size · sum of squares of the channels around) ^ beta."""
    squares = F.pad(x.square().flatten(2).transpose(1, 2), ((size - 1) // 2, size // 2))
    near = squares.unfold(2, size, 1).sum(-1).transpose(1, 2).reshape(x.shape)
    return x / (bias + alpha / size * near) ** beta


@of_onnx("MeanVarianceNormalization")
def mean_variance_norm(x: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    """(x - mean) / (standard deviation + 1e-9)."""
    # Its gradient is 0 where all elements are equal, and that of a root would be none.
    std, mean = torch.std_mean(x, list(axes), correction=0, keepdim=True)
    return (x - mean) / (std + 1e-9)


@of_onnx("LpNormalization")
def lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """X / its p-norm along the axis; 0 where that is 0."""
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else x.norm(2, axis, keepdim=True)
    return torch.where(norm == 0, 0, x / norm.masked_fill(norm == 0, 1))


@of_onnx("SimplifiedLayerNormalization")
@of_onnx("SimplifiedLayerNormalization", domain=MICROSOFT)
def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Tensor, Tensor]:
    """X / the root of the mean of its squares, times scale; gives the factors 1 / root, too."""
    axes = list(range(axis % x.ndim, x.ndim))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    factors = (wide.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    if x.dtype == wide.dtype:
        return F.rms_norm(x, x.shape[axes[0] :], scale, epsilon), factors
    return (wide * factors).to(x.dtype) * scale, factors


def _skipped(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    total = x + skip
    return total if bias is None else total + bias


@of_onnx("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(
    x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None,
    *, epsilon: float = 1e-12,
) -> tuple[Tensor, None, None, Tensor]:  # fmt: skip
    """Layer norm of x + skip + bias; gives that sum as the fourth result."""
    total = _skipped(x, skip, bias)
    return F.layer_norm(total, total.shape[-1:], gamma, beta, epsilon), None, None, total


@of_onnx("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_rms_norm(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> tuple[Tensor, None, None, Tensor]:
    """RMS norm of x + skip + bias; gives that sum as the fourth result."""
    total = _skipped(x, skip, bias)
    return rms_norm(total, gamma, epsilon=epsilon)[0], None, None, total


@of_onnx("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_norm(
    ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor,
    of_segments: Tensor | None, gamma: Tensor, beta: Tensor, mask: Tensor | None = None,
    position_ids: Tensor | None = None, *, epsilon: float = 1e-12, mask_index_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Layer norm of embeddings of words, positions and segments.

    Gives the number of tokens that count in each row, and the sum of embeddings, too.
    """
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    total = F.embedding(ids, words) + F.embedding(position_ids, positions)
    if segments is not None and of_segments is not None:
        total = total + F.embedding(segments, of_segments)
    if mask is None:
        lengths = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device)
    else:
        lengths = mask.sum(1).to(torch.int32)
    return F.layer_norm(total, total.shape[-1:], gamma, beta, epsilon), lengths, total
