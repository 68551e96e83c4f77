"""Convolutions and pools in the forms that the engine's own calls lack.

Those are padding by rule (`auto_pad`), sizes of results that are given, pools with places of
maxima, and pools by a p-norm. Inputs are (batch, channels, ...).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort.onnx.functions.table import any_of, has_attribute, has_outputs, of_onnx

_BY_RULE = has_attribute("auto_pad", b"SAME_UPPER", b"SAME_LOWER")

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _or_ones(given: Sequence[int], rank: int) -> list[int]:
    return list(given) or [1] * rank


def _pads(
    sizes: Sequence[Any], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    pads: Sequence[int], auto_pad: str,
) -> list[tuple[Any, Any]]:  # fmt: skip
    """Give what is added before and behind each dim."""
    rank = len(sizes)
    if auto_pad in ("NOTSET", "VALID"):
        given = list(pads) if pads and auto_pad == "NOTSET" else [0] * 2 * rank
        return list(zip(given[:rank], given[rank:], strict=True))
    found = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        count = -(-size // stride)
        missing = (count - 1) * stride + dilation * (k - 1) + 1 - size
        total = torch.sym_max(missing, 0)
        less = total // 2
        found.append((less, total - less) if auto_pad == "SAME_UPPER" else (total - less, less))
    return found


def _padded(x: Tensor, pads: Sequence[tuple[Any, Any]], value: float = 0.0) -> Tensor:
    flat = [amount for pair in reversed(pads) for amount in pair]
    if all(isinstance(amount, int) and amount == 0 for amount in flat):
        return x
    return F.pad(x, flat, value=value)


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, dilations: Sequence[int], group: int,
    pads: Sequence[int], strides: Sequence[int], auto_pad: str,
) -> Tensor:  # fmt: skip
    """Convolve with the attributes that ONNX's Conv has."""
    rank = x.ndim - 2
    strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
    amounts = _pads(x.shape[2:], weight.shape[2:], strides, dilations, pads, auto_pad)
    return _CONVOLUTIONS[rank](
        _padded(x, amounts), weight, bias, strides, [0] * rank, dilations, group
    )


@of_onnx("Conv", when=_BY_RULE)
def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str,
    dilations: Sequence[int] = (), group: int = 1, kernel_shape: Sequence[int] = (),
    pads: Sequence[int] = (), strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Convolve what is padded so that results have the input's sizes over the strides."""
    return convolved(x, weight, bias, dilations, group, pads, strides, auto_pad)


@of_onnx("ConvTranspose", when=any_of(_BY_RULE, has_attribute("output_shape")))
def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str = "NOTSET",
    dilations: Sequence[int] = (), group: int = 1, kernel_shape: Sequence[int] = (),
    output_padding: Sequence[int] = (), output_shape: Sequence[int] = (),
    pads: Sequence[int] = (), strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Convolve transposed; the result is cut to sizes that are given or follow from strides."""
    rank = x.ndim - 2
    strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
    extra = list(output_padding) or [0] * rank
    # The bias is added behind the cut: it is in what is padded as well.
    whole = _TRANSPOSED[rank](x, weight, None, strides, 0, 0, group, dilations)
    for i in range(rank):
        wanted = output_shape[-rank:][i] if output_shape else x.shape[2 + i] * strides[i]
        spare = whole.shape[2 + i] + extra[i] - wanted
        # What is missing is padded behind, as onnxruntime does it.
        whole = _padded(whole, [(0, extra[i] + torch.sym_max(-spare, 0) if i == j else 0)
                                for j in range(rank)])  # fmt: skip
        cut = torch.sym_max(spare, 0)
        before = cut // 2 if auto_pad == "SAME_UPPER" else cut - cut // 2
        whole = whole.narrow(2 + i, before, wanted)
    return whole if bias is None else whole + bias.view(-1, *[1] * rank)


def _counts(
    sizes: Sequence[Any], amounts: Sequence[tuple[Any, Any]], kernel: Sequence[int],
    strides: Sequence[int], dilations: Sequence[int], ceil_mode: int,
) -> list[Any]:  # fmt: skip
    """Give the sizes of a pool's results. No window begins behind the image."""
    counts = []
    for size, (before, behind), k, stride, dilation in zip(
        sizes, amounts, kernel, strides, dilations, strict=True
    ):
        room = size + before + behind - dilation * (k - 1) - 1
        count = (-(-room // stride) if ceil_mode else room // stride) + 1
        if ceil_mode:
            count = torch.sym_min(count, (size + before - 1) // stride + 1)
        counts.append(count)
    return counts


_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _reached(
    sizes: Sequence[Any], amounts: Sequence[tuple[Any, Any]], counts: Sequence[Any],
    kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
) -> list[tuple[Any, Any]]:  # fmt: skip
    """Give what is added before and behind each dim so that the last window fits in.

    A rest that no window reaches stays, since kernels leave it out.
    """
    return [
        (before, torch.sym_max((count - 1) * stride + dilation * (k - 1) + 1 - size - before, 0))
        for size, (before, _), count, k, stride, dilation in zip(
            sizes, amounts, counts, kernel, strides, dilations, strict=True
        )
    ]


def _is_one_dimensional(node: onnx.NodeProto) -> bool:
    kernel = [each for each in node.attribute if each.name == "kernel_shape"]
    return bool(kernel) and len(kernel[0].ints) == 1


@of_onnx(
    "AveragePool",
    when=any_of(
        _BY_RULE, _is_one_dimensional, has_attribute("ceil_mode", 1), has_attribute("dilations")
    ),
)
def average_pool(
    x: Tensor, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Sequence[int] = (), kernel_shape: Sequence[int], pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Give the mean of windows, over their pixels inside of the image, or of the padded one."""
    rank = x.ndim - 2
    strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
    amounts = _pads(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    counts = _counts(x.shape[2:], amounts, kernel_shape, strides, dilations, ceil_mode)
    reached = _reached(x.shape[2:], amounts, counts, kernel_shape, strides, dilations)
    ones = x.new_ones(1, 1, *x.shape[2:])
    if count_include_pad:  # what is padded counts, and what a last window has beyond that does not
        ends = [(far, behind) for (_, far), (_, behind) in zip(reached, amounts, strict=True)]
        ones = _padded(
            ones, [(a[0], torch.sym_min(*end)) for a, end in zip(amounts, ends, strict=True)], 1.0
        )
        ones = _padded(ones, [(0, torch.sym_max(far - behind, 0)) for far, behind in ends])
    else:
        ones = _padded(ones, reached)
    return _summed(_padded(x, reached), kernel_shape, strides, dilations) / _summed(
        ones, kernel_shape, strides, dilations
    )


def _summed(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Tensor:
    """Sum windows."""
    if all(dilation == 1 for dilation in dilations):
        return _AVERAGE_POOLS[x.ndim - 2](x, list(kernel), strides) * math.prod(kernel)
    weight = x.new_ones(x.shape[1], 1, *kernel)
    return _CONVOLUTIONS[x.ndim - 2](x, weight, None, strides, 0, dilations, x.shape[1])


@of_onnx(
    "MaxPool",
    when=any_of(
        _BY_RULE, _is_one_dimensional, has_attribute("ceil_mode", 1),
        has_attribute("storage_order", 1), has_outputs(1),
    ),
)  # fmt: skip
def max_pool(
    x: Tensor, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Sequence[int] = (),
    kernel_shape: Sequence[int], pads: Sequence[int] = (), storage_order: int = 0,
    strides: Sequence[int] = (), wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Give the maximum of windows, and its place in the whole tensor.

    Places count elements row by row, or, with a storage order of 1, column by column.
    """
    rank = x.ndim - 2
    strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
    amounts = _pads(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    counts = _counts(x.shape[2:], amounts, kernel_shape, strides, dilations, ceil_mode)
    reached = _reached(x.shape[2:], amounts, counts, kernel_shape, strides, dilations)
    given = x if x.is_floating_point() else x.double()  # kernels lack integers of 8 bits
    padded = _padded(given, reached, -math.inf)
    pool = _MAX_POOLS[rank]
    if len(wanted) < 2 or not wanted[1]:
        result = pool(padded, list(kernel_shape), strides, 0, dilations)
        return result.to(x.dtype), None
    result, at = pool(padded, list(kernel_shape), strides, 0, dilations, return_indices=True)
    places: Any = 0
    step: Any = 1
    for i in range(rank) if storage_order else range(rank - 1, -1, -1):
        inner = math.prod(padded.shape[3 + i :])
        places = places + (at // inner % padded.shape[2 + i] - reached[i][0]) * step
        step = step * x.shape[2 + i]
    image = torch.arange(x.shape[0] * x.shape[1], device=x.device) * step
    return result.to(x.dtype), places + image.view(*x.shape[:2], *[1] * rank)


@of_onnx("LpPool")
def lp_pool(
    x: Tensor, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Sequence[int] = (),
    kernel_shape: Sequence[int], p: int = 2, pads: Sequence[int] = (), strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Give the p-norm of windows."""
    rank = x.ndim - 2
    strides, dilations = _or_ones(strides, rank), _or_ones(dilations, rank)
    amounts = _pads(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    counts = _counts(x.shape[2:], amounts, kernel_shape, strides, dilations, ceil_mode)
    windows = _padded(x, _reached(x.shape[2:], amounts, counts, kernel_shape, strides, dilations))
    for i in range(rank):  # each dim becomes the places of windows, and a last one of its places
        extent = dilations[i] * (kernel_shape[i] - 1) + 1
        windows = windows.unfold(2 + i, extent, strides[i])[..., :: dilations[i]]
    return windows.flatten(2 + rank).norm(p, -1)


@of_onnx("GlobalLpPool")
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    """Give the p-norm of each channel."""
    norm = x.flatten(2).norm(p, -1)
    return norm.view(*norm.shape, *[1] * (x.ndim - 2))


@of_onnx("MaxUnpool", numbers=(2,))
def max_unpool(
    x: Tensor, indices: Tensor, output_shape: Sequence[int] | None = None, *,
    kernel_shape: Sequence[int], pads: Sequence[int] = (), strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Write elements to their places in zeros; places count the elements of what was pooled."""
    rank = x.ndim - 2
    strides = _or_ones(strides, rank)
    amounts = list(pads) or [0] * 2 * rank
    usual = [
        (x.shape[2 + i] - 1) * strides[i] + kernel_shape[i] - amounts[i] - amounts[i + rank]
        for i in range(rank)
    ]
    sizes = list(output_shape) if output_shape else [*x.shape[:2], *usual]
    # Places are those in an image of the usual sizes, within the tensor of all images.
    pixel = indices % math.prod(usual)
    place: Any = 0
    coordinates = []
    for size in reversed(usual):
        coordinates.append(pixel % size)
        pixel = pixel // size
    for at, size in zip(reversed(coordinates), sizes[2:], strict=True):
        place = place * size + at
    zeros = x.new_zeros(*x.shape[:2], math.prod(sizes[2:]))
    return zeros.scatter(2, place.flatten(2), x.flatten(2)).view(sizes)


@of_onnx("CausalConvWithState")
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, past_state: Tensor | None = None, *,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolve each channel over its present and past; gives the last places for the next call."""
    reach = weight.shape[-1] - 1
    if past_state is None:
        past_state = x.new_zeros(*x.shape[:2], reach)
    extended = torch.cat([past_state, x], -1)
    result = F.conv1d(extended, weight, bias, groups=x.shape[1])
    if activation in ("silu", "swish"):
        result = F.silu(result)
    return result, extended[..., extended.shape[-1] - reach :]
