"""Operators that shift and scale by statistics."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import MICROSOFT, dtype_of, has_attribute, of_onnx


def _along_channels(x: Tensor, values: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 2))


@of_onnx("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalize each channel of each sample (batch, channels, ...)."""
    # As groups of one channel: PyTorch's instance norm refuses an empty batch, and
    # torch.nn.functional's group norm one element.
    return torch.group_norm(x, x.shape[1], scale, bias, epsilon)


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
    centred = x - x.mean(axes, keepdim=True)
    var = centred.square().mean(axes, keepdim=True)
    # Where all elements are equal, a root has no finite slope.
    is_flat = var == 0
    std = var.masked_fill(is_flat, 1).sqrt().masked_fill(is_flat, 0)
    return centred / (std + 1e-9)


@of_onnx("LpNormalization")
def lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """X / its p-norm along the axis; 0 where that is 0."""
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else x.norm(2, axis, keepdim=True)
    return torch.where(norm == 0, 0, x / norm.masked_fill(norm == 0, 1))


def _wide(x: Tensor) -> Tensor:
    """Give half types as float32, in which ONNX Runtime's kernels compute."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@of_onnx("SimplifiedLayerNormalization")
@of_onnx("SimplifiedLayerNormalization", domain=MICROSOFT)
def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Tensor, Tensor]:
    """X / the root of the mean of its squares, times scale; gives the factors 1 / root, too.

    The result has the dtype of the scale, and the factors that of `stash_type`.
    """
    axes = list(range(axis % x.ndim, x.ndim))
    wide = _wide(x)
    factors = (wide.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    sizes = x.shape[axes[0] :]
    if x.dtype == wide.dtype == scale.dtype and scale.shape == sizes:
        result = F.rms_norm(x, sizes, scale, epsilon)
    else:
        result = (wide * factors * _wide(scale)).to(scale.dtype)
    return result, factors.to(dtype_of(stash_type))


def _skipped(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    total = _wide(x) + _wide(skip)
    return total if bias is None else total + _wide(bias)


@of_onnx("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(
    x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None,
    *, epsilon: float = 1e-12, wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Layer norm of x + skip + bias; gives the mean, 1 / standard deviation, and that sum, too."""
    total = _skipped(x, skip, bias)
    result = F.layer_norm(
        total, total.shape[-1:], _wide(gamma), None if beta is None else _wide(beta), epsilon
    )
    mean = factors = None
    if any(wanted[1:3]):
        var, mean = torch.var_mean(total, -1, correction=0, keepdim=True)
        factors = (var + epsilon).rsqrt()
    return result.to(x.dtype), mean, factors, total.to(x.dtype)


@of_onnx("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_rms_norm(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, None, Tensor, Tensor]:  # fmt: skip
    """RMS norm of x + skip + bias; gives the factors 1 / root, and that sum, too."""
    if len(wanted) > 1 and wanted[1]:
        raise _C.Unsupported("SkipSimplifiedLayerNormalization: mean: got one, want none")
    total = _skipped(x, skip, bias)
    result, factors = rms_norm(total, _wide(gamma), epsilon=epsilon)
    return result.to(x.dtype), None, factors, total.to(x.dtype)


@of_onnx("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_norm(
    ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor,
    of_segments: Tensor | None, gamma: Tensor, beta: Tensor, mask: Tensor | None = None,
    position_ids: Tensor | None = None, *, epsilon: float = 1e-12, mask_index_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Layer norm of embeddings of words, positions and segments.

    Gives the number of ones in each row of the mask, and the sum of embeddings, too.
    """
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    total = F.embedding(ids, words) + F.embedding(position_ids, positions)
    if of_segments is not None:  # without their numbers, all tokens are in the first one
        of_tokens = of_segments[0] if segments is None else F.embedding(segments, of_segments)
        total = total + of_tokens
    if mask is None:
        lengths = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device)
    else:
        lengths = (mask == 1).sum(1).to(torch.int32)
    return F.layer_norm(total, total.shape[-1:], gamma, beta, epsilon), lengths, total
