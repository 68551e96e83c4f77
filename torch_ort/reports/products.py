"""What products, convolutions, attention and recurrent layers compute: sizes and operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

# Where the first factor is among the arguments. Products with a vector are left out: they read each
# number of the matrix once, and so are limited by memory.
FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
# The positions of the query, and of the flag for causal attention.
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "_scaled_dot_product_flash_attention": (0, 4),
    "_scaled_dot_product_efficient_attention": (0, 6),
    "_scaled_dot_product_cudnn_attention": (0, 6),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7),
    "_scaled_dot_product_flash_attention_backward": (1, 11),
    "_scaled_dot_product_efficient_attention_backward": (1, 11),
    "_scaled_dot_product_cudnn_attention_backward": (1, 14),
}
# The layers of an LSTM in eager PyTorch, by the products of each position. Backward computes the
# gradients of both factors.
_ONEDNN_LSTM = {"mkldnn_rnn_layer": 1, "mkldnn_rnn_layer_backward": 2}


@dataclass(frozen=True)
class Product:
    """Some products of equal sizes, m×k by k×n."""

    count: int
    m: int
    k: int
    n: int
    flops: int  # a multiplication and an addition are two

    @property
    def sizes(self) -> str:
        """`8 of 128×64×128`; one stands without its count."""
        one = f"{self.m}×{self.k}×{self.n}"
        return one if self.count == 1 else f"{self.count} of {one}"


def product(op: str, args: Sequence[Any]) -> Product | None:
    """Say what an operator computes, if it is a product; those of ATen stand without `aten::`.

    `args` are those of its schema by position; a tensor is given by its shape.
    """
    if op in FIRST_FACTOR:
        left, right = args[FIRST_FACTOR[op] :][:2]
        return _product(prod(left[:-2]), left[-2], left[-1], right[-1])
    if op == "convolution":
        x, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
        out = x if transposed else [x[0], 0, *_windows(x, weight, stride, padding, dilation)]
        return _convolution(out, weight, transposed, groups)
    if op == "convolution_backward":
        gradient, x, weight, _, _, _, _, transposed, _, groups, wanted = args[:11]
        count = sum(wanted[:2])  # the gradient of the bias is no product
        return _convolution(x if transposed else gradient, weight, transposed, groups, count)
    if op in _ATTENTION:
        first, causal = _ATTENTION[op]
        is_causal = len(args) > causal and args[causal]
        return attention(*args[first : first + 3], is_causal, op.endswith("_backward"))
    if op in _ONEDNN_LSTM:
        # The products of the input are among the sizes: one factor is input and state side by side.
        (positions, batch, inputs), (gates, _), (_, width) = args[:3]
        return _product(_ONEDNN_LSTM[op] * positions, batch, inputs + width, gates)
    if op == "torch_ort::recurrent":  # a product for each position
        (positions, batch, gates), (_, width) = args[:2]
        return _product(positions, batch, width, gates)
    if op == "torch_ort::recurrent_backward":
        (gates, width), (positions, batch, _) = args[3], args[6]
        return _product(positions, batch, gates, width)
    return None


def attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], is_causal: bool, backward: bool
) -> Product:
    """Say what attention cannot do without: two products forward, four backward; half if causal.

    Operands are given by their shapes, (..., length, depth).
    """
    count, rows, depth, columns = prod(query[:-2]), query[-2], query[-1], key[-2]
    # Products of queries with keys, and as many of weights with values.
    flops = (2 if backward else 1) * 2 * count * rows * columns * (depth + value[-1])
    if is_causal:
        flops //= 2
    return Product((4 if backward else 2) * count, rows, depth, columns, flops)


def convolution(places: Sequence[int], weight: Sequence[int], groups: int) -> Product:
    """Say what a convolution computes, or one of its gradients, which multiplies as much.

    By the places that windows are at, (N, any, H, W): the result's, or those of its gradient.
    """
    return _convolution(places, weight, False, groups)


def winograd(result: Sequence[int], channels: int) -> Product:
    """Say what a convolution of 3×3 multiplies by Winograd's algorithm, by its result (N, C, H, W).

    That is a product of tiles and channels for each of the 16 places of a tile; one of 3×3×3 has
    three for each plane of a volume (N, C, D, H, W).
    """
    return _product(16, _tiles(result), _depths(result) * channels, result[1])


def winograd_weight_gradient(gradient: Sequence[int], channels: int) -> Product:
    """Say the same of its gradient towards the weight, which is summed over tiles."""
    return _product(16 * _depths(gradient), gradient[1], _tiles(gradient), channels)


def _tiles(result: Sequence[int]) -> int:
    batch, _, *planes, height, width = result
    return batch * prod(planes) * ((height + 1) // 2) * ((width + 1) // 2)


def _depths(result: Sequence[int]) -> int:
    """Give the planes of a window."""
    return 3 if len(result) == 5 else 1


def rows_product(left: Sequence[int], right: Sequence[int], is_sum: bool, count: int) -> Product:
    """Say what a product of listed rows computes, `count` of them.

    They are rows of `left` (N, k) and of the result, or, where they are summed over, columns of
    `left` (m, N) and rows of `right` (N, n).
    """
    rows, summed = (left[0], count) if is_sum else (count, left[1])
    return Product(1, rows, summed, right[1], 2 * rows * summed * right[1])


def _product(count: int, m: int, k: int, n: int) -> Product:
    return Product(count, m, k, n, 2 * count * m * k * n)


def _windows(
    x: Sequence[int], weight: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> list[int]:
    """Give how often the kernel fits into an image, by dimension."""
    dims = len(x) - 2
    stride, padding, dilation = (
        each * dims if len(each) == 1 else each for each in (stride, padding, dilation)
    )
    return [
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(dims)
    ]


def _convolution(
    places: Sequence[int], weight: Sequence[int], transposed: bool, groups: int, count: int = 1
) -> Product:
    """Give convolutions as products: the kernel meets each of the places, (N, any, H, W)."""
    kernel, rows = prod(weight[2:]), places[0] * prod(places[2:])
    if transposed:
        return _product(count * groups, rows, weight[0] // groups, weight[1] * kernel)
    return _product(count * groups, rows, weight[1] * kernel, weight[0] // groups)
