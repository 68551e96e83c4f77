"""Operators that sample images at other places: resizing, grids, regions, deformed windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import of_onnx

# ---- Resize


@of_onnx("Upsample", numbers=(1,))
def upsample(
    x: Tensor, scales_input: Sequence[float] | None = None, *, mode: str = "nearest",
    scales: Sequence[float] = (),
) -> Tensor:  # fmt: skip
    """Resize by factors, as opsets before 10 do it; before 9 these are an attribute."""
    factors = list(scales_input or scales)
    return resize(
        x, None, factors, mode="linear" if mode == "bilinear" else mode, nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )  # fmt: skip


# The factor of an axis as a quotient of integers: what is computed from sizes stays whole, so that
# no float depends on sizes that are symbols, and places are rounded once.
Factor = tuple[Any, Any]


@of_onnx("Resize", numbers=(1, 2, 3))
def resize(
    x: Tensor, roi: Sequence[float] | None = None, scales: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None, *, antialias: int = 0, axes: Sequence[int] = (),
    coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0, extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch", mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:  # fmt: skip
    """Resize axes to sizes, or by factors, with one of ONNX's maps from new places to old ones.

    PyTorch's kernels compute the forms that they have; in all others each axis is a product with
    a matrix of weights. "by_factor" is how opset 10 rounds: down, or up where an axis shrinks.
    """
    if mode == "nearest" and exclude_outside:  # the weight of what is left would be 0 / 0
        raise _C.Unsupported("Resize: exclude_outside: got mode nearest, want linear or cubic")
    if mode != "nearest" and not x.is_floating_point():  # ONNX does not say how to round
        raise _C.Unsupported(f"Resize: mode {mode}: got {x.dtype}, want a floating-point dtype")
    chosen = [axis % x.ndim for axis in axes] or list(range(x.ndim))
    lengths, factors = _lengths(x, chosen, scales, sizes, keep_aspect_ratio_policy)
    if nearest_mode == "by_factor" and all(n >= d for n, d in factors):
        nearest_mode = "floor"
    if not (antialias or exclude_outside):
        result = _by_kernel(
            x, chosen, lengths, factors, bool(scales) or keep_aspect_ratio_policy != "stretch",
            mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a,
        )  # fmt: skip
        if result is not None:
            return result
    is_cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    is_outside: Any = False
    dtype = x.dtype
    if mode != "nearest" and dtype.itemsize < 4:  # halves are rounded once, not for each axis
        x = x.float()
    for i, axis in enumerate(chosen):
        if not is_cropped and factors[i][0] == factors[i][1]:
            continue
        start, end = (roi[i], roi[i + len(chosen)]) if roi else (0.0, 1.0)
        places = _places(
            x.shape[axis], lengths[i], factors[i], coordinate_transformation_mode, start, end, x
        )
        if is_cropped:
            beyond = (places < 0) | (places > x.shape[axis] - 1)
            is_outside = is_outside | beyond.view(*[-1 if j == axis else 1 for j in range(x.ndim)])
        if mode == "nearest":
            rounding = nearest_mode
            if rounding == "by_factor":
                rounding = "ceil" if factors[i][0] < factors[i][1] else "floor"
            x = x.index_select(axis, _nearest(places, rounding, x.shape[axis]))
            continue
        narrowed = factors[i] if antialias and factors[i][0] < factors[i][1] else (1, 1)
        weights = _weights(
            places, x.shape[axis], mode, narrowed, cubic_coeff_a, bool(exclude_outside)
        )
        x = (x.movedim(axis, -1) @ weights.to(x.dtype).t()).movedim(-1, axis)
    return (torch.where(is_outside, extrapolation_value, x) if is_cropped else x).to(dtype)


def _lengths(
    x: Tensor, axes: list[int], scales: Sequence[float] | None, sizes: Sequence[int] | None,
    policy: str,
) -> tuple[list[Any], list[Factor]]:  # fmt: skip
    """Give the new sizes of axes, and their factors."""
    if scales:
        factors: list[Factor] = [factor.as_integer_ratio() for factor in scales]
        return [x.shape[axis] * n // d for axis, (n, d) in zip(axes, factors, strict=True)], factors
    if not sizes:
        raise _C.UserError("Resize: got neither scales nor sizes")
    factors = [
        (1, 1) if size == x.shape[axis] else (size, x.shape[axis])
        for axis, size in zip(axes, sizes, strict=True)
    ]
    if policy == "stretch":
        return list(sizes), factors
    n, d = factors[0]
    for n2, d2 in factors[1:]:
        is_smaller = n2 * d < n * d2
        if is_smaller == (policy == "not_larger"):
            n, d = n2, d2
    # Half a pixel is rounded up.
    return [(2 * x.shape[axis] * n + d) // (2 * d) for axis in axes], [(n, d)] * len(axes)


def _by_kernel(
    x: Tensor, axes: list[int], lengths: list[Any], factors: list[Factor], is_rounded: bool,
    mode: str, coordinates: str, nearest: str, cubic: float,
) -> Tensor | None:  # fmt: skip
    """Call a kernel of PyTorch's for the last dims of an image; None where there is none."""
    spatial = range(2, x.ndim)
    is_image = 3 <= x.ndim <= 5 and all(axis in axes for axis in spatial)
    if isinstance(x.shape[0], int) and x.shape[0] == 0:  # the kernels' types are wrong for none
        return None
    if not is_image or any(axis < 2 and n != d for axis, (n, d) in zip(axes, factors, strict=True)):
        return None
    at = [axes.index(axis) for axis in spatial]
    size = [lengths[i] for i in at]
    # By factors, an image may end within a pixel, which kernels do not know.
    if is_rounded and any(x.shape[axes[i]] * factors[i][0] % factors[i][1] != 0 for i in at):
        return None
    is_half = coordinates == "half_pixel" or (
        coordinates == "pytorch_half_pixel" and all(isinstance(n, int) and n > 1 for n in size)
    )
    is_aligned = coordinates == "align_corners"
    if mode == "nearest" and coordinates == "asymmetric" and nearest == "floor":
        return F.interpolate(x, size, mode="nearest")
    if mode == "linear" and (is_half or is_aligned):
        kind = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]
        return F.interpolate(x, size, mode=kind, align_corners=not is_half)
    if mode == "cubic" and x.ndim == 4 and cubic == -0.75 and (is_half or is_aligned):
        return F.interpolate(x, size, mode="bicubic", align_corners=not is_half)
    return None


def _places(
    length: Any, resized: Any, factor: Factor, coordinates: str, start: float, end: float, x: Tensor
) -> Tensor:
    """Give the places in the old axis of those in the new one (ONNX, Resize)."""
    at = torch.arange(resized, device=x.device, dtype=torch.float64)
    n, d = factor
    # ONNX's width is length · n / d, and need not be an integer.
    if coordinates == "half_pixel":
        return (2 * at + 1) * d / (2 * n) - 0.5
    if coordinates == "tf_half_pixel_for_nn":  # of opset 11 alone
        return (2 * at + 1) * d / (2 * n)
    if coordinates == "half_pixel_symmetric":
        return ((2 * at + 1) * d + (length * n - resized * d)) / (2 * n) - 0.5
    if coordinates == "pytorch_half_pixel":
        return (2 * at + 1) * d / (2 * n) - 0.5 if resized > 1 else at * 0
    if coordinates == "align_corners":
        return at * ((length - 1) * d) / (length * n - d) if length * n != d else at * 0
    if coordinates == "asymmetric":
        return at * d / n
    if coordinates == "tf_crop_and_resize":
        first = torch.zeros_like(at) + (length - 1)
        if length * n > d:
            return first * start + at * (end - start) * ((length - 1) * d) / (length * n - d)
        return first * (0.5 * (start + end))
    raise _C.Unsupported(f"Resize: coordinate_transformation_mode: got {coordinates}")


def _nearest(places: Tensor, mode: str, length: Any) -> Tensor:
    rounded = {
        "round_prefer_floor": lambda at: torch.ceil(at - 0.5),
        "round_prefer_ceil": lambda at: torch.floor(at + 0.5),
        "floor": torch.floor,
        "ceil": torch.ceil,
    }
    return rounded[mode](places).clamp(0, length - 1).long()


def _weights(
    places: Tensor, length: Any, mode: str, factor: Factor, cubic: float, exclude_outside: bool
) -> Tensor:
    """Give (new places, old places): what each old pixel adds to a new one."""
    n, d = factor  # at most 1, by which the filter is wider
    reach = -(-(2 if mode == "cubic" else 1) * d // n)
    old = torch.arange(-reach, length + reach, device=places.device, dtype=torch.float64)
    distance = (old - places.unsqueeze(1)).abs() * n / d
    weights = _cubic(distance, cubic) if mode == "cubic" else (1 - distance).clamp(min=0)
    if exclude_outside:
        weights = weights * ((old >= 0) & (old < length))
    weights = weights / weights.sum(1, keepdim=True)
    # Pixels beyond the ends are the last ones.
    to = old.clamp(0, length - 1).long()
    return weights.new_zeros(weights.shape[0], length).index_add(1, to, weights)


# ---- grids


@of_onnx("AffineGrid", numbers=(1,))
def affine_grid(theta: Tensor, size: Sequence[int], *, align_corners: int = 0) -> Tensor:
    """Give the places of images under affine maps (batch, 2, 3) or (batch, 3, 4).

    It is spelled out, since PyTorch's function takes no sizes that are symbols.
    """
    lengths = list(size[2:])
    if align_corners and any(length == 1 for length in lengths):  # both corners are one pixel
        raise _C.Unsupported("AffineGrid: align_corners: got a size of 1, want 2 or more")
    places = []
    for i, length in enumerate(lengths):
        at = torch.arange(length, device=theta.device, dtype=theta.dtype)
        at = 2 * at / (length - 1) - 1 if align_corners else (2 * at + 1) / length - 1
        places.append(at.view(*[-1 if j == i else 1 for j in range(len(lengths))]).expand(lengths))
    one = torch.ones_like(places[0])
    pixels = torch.stack([*reversed(places), one], -1).flatten(0, -2)
    return (pixels @ theta.transpose(1, 2)).unflatten(1, lengths)


@of_onnx("GridSample")
def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear",
    padding_mode: str = "zeros",
) -> Tensor:  # fmt: skip
    """Sample images (batch, channels, ...) at places (batch, ..., dims) between -1 and 1.

    Before opset 20 the modes are called bilinear and bicubic.
    """
    modes = {"linear": "bilinear", "cubic": "bicubic"}
    mode = modes.get(mode, mode)
    if x.ndim == 4 or (x.ndim == 5 and mode != "bicubic"):
        return F.grid_sample(x, grid, mode, padding_mode, bool(align_corners))
    return _grid_sample(x, grid, mode, padding_mode, bool(align_corners))


def _grid_sample(
    x: Tensor, grid: Tensor, mode: str, padding: str, align_corners: bool
) -> Tensor:  # fmt: skip
    """Sample images of any number of dims; those with 4 and 5 have kernels."""
    sizes = x.shape[2:]
    places = []
    for at, size in zip(reversed(grid.unbind(-1)), sizes, strict=True):
        scaled = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        if padding == "border" and mode != "bicubic":
            scaled = scaled.clamp(0, size - 1)
        elif padding == "reflection" and mode != "bicubic":
            scaled = _reflected(scaled, size, align_corners).clamp(0, size - 1)
        places.append(scaled)
    around = [_neighbours(at, mode) for at in places]
    total: Any = 0
    for corner in itertools.product(*around):
        weight: Any = 1.0
        index: Any = 0
        is_inside: Any = True
        for (at, part), size in zip(corner, sizes, strict=True):
            weight = weight * part
            pixel = _reflected(at, size, align_corners) if padding == "reflection" else at
            is_inside = is_inside & ((pixel >= 0) & (pixel <= size - 1))
            index = index * size + pixel.clamp(0, size - 1).long()
        flat = index.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
        picked = x.flatten(2).gather(2, flat).view(*x.shape[:2], *index.shape[1:])
        if padding == "zeros":
            picked = torch.where(is_inside.unsqueeze(1), picked, 0)
        total = total + (picked * weight.unsqueeze(1) if isinstance(weight, Tensor) else picked)
    return total


def _neighbours(at: Tensor, mode: str) -> list[tuple[Tensor, Any]]:
    """Give the pixels around a place along one dim, and how much each of them counts."""
    if mode == "nearest":
        return [(at.round(), 1.0)]
    reach = (0, 1) if mode == "bilinear" else (-1, 0, 1, 2)
    pixels = [at.floor() + i for i in reach]
    distances = [(at - pixel).abs() for pixel in pixels]
    weigh = (lambda distance: 1 - distance) if mode == "bilinear" else _cubic
    return [(pixel, weigh(far)) for pixel, far in zip(pixels, distances, strict=True)]


def _cubic(distance: Tensor, a: float = -0.75) -> Tensor:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0))


def _reflected(at: Tensor, size: Any, align_corners: bool) -> Tensor:
    """Reflect places at the centres of the last pixels, or at their outer edges."""
    low, high = (0.0, size - 1) if align_corners else (-0.5, size - 0.5)
    span = high - low
    if not isinstance(span, torch.SymInt | torch.SymFloat) and span == 0:
        return torch.zeros_like(at)
    distance = (at - low).abs()
    rest = torch.fmod(distance, span)
    is_even = (distance / span).floor() % 2 == 0
    return torch.where(is_even, rest + low, high - rest)


# ---- regions and deformed windows


def _bilinear(x: Tensor, batch: Tensor, y: Tensor, along: Tensor) -> Tensor:
    """Sample x (batch, channels, height, width) between pixels; 0 outside.

    `batch`, `y` and `along` have the same shape; gives it with channels in front.
    """
    height, width = x.shape[2], x.shape[3]
    flat = x.permute(1, 0, 2, 3).flatten(1)
    total: Any = 0
    for i, j in itertools.product((0, 1), (0, 1)):
        row, column = y.floor() + i, along.floor() + j
        weight = (1 - (y - row).abs()) * (1 - (along - column).abs())
        is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        at = (batch * height + row.clamp(0, height - 1).long()) * width + column.clamp(
            0, width - 1
        ).long()
        picked = flat[:, at] * torch.where(is_inside, weight, 0)
        total = total + picked
    return total


@of_onnx("DeformConv")
def deform_conv(
    x: Tensor, weight: Tensor, offset: Tensor, bias: Tensor | None = None,
    mask: Tensor | None = None, *, dilations: Sequence[int] = (1, 1), group: int = 1,
    kernel_shape: Sequence[int] = (), offset_group: int = 1, pads: Sequence[int] = (0, 0, 0, 0),
    strides: Sequence[int] = (1, 1),
) -> Tensor:  # fmt: skip
    """Convolve images (batch, channels, height, width) in windows whose places are moved."""
    if x.ndim != 4:
        raise _C.Unsupported(f"DeformConv: input: got rank {x.ndim}, want 4")
    batch, channels = x.shape[:2]
    kh, kw = weight.shape[2:]
    height, width = offset.shape[2:]
    moves = offset.view(batch, offset_group, kh * kw, 2, height, width)
    options = {"device": x.device, "dtype": x.dtype}
    rows = torch.arange(height, **options) * strides[0] - pads[0]
    columns = torch.arange(width, **options) * strides[1] - pads[1]
    in_rows = (torch.arange(kh, **options) * dilations[0]).repeat_interleave(kw)
    in_columns = (torch.arange(kw, **options) * dilations[1]).repeat(kh)
    y = moves[:, :, :, 0] + rows.view(-1, 1) + in_rows.view(-1, 1, 1)
    along = moves[:, :, :, 1] + columns + in_columns.view(-1, 1, 1)
    numbers = torch.arange(batch * offset_group, device=x.device).view(batch, offset_group, 1, 1, 1)
    shared = channels // offset_group
    parts = x.reshape(batch * offset_group, shared, *x.shape[2:])
    # (shared, batch, offset_group, places in the window, height, width)
    picked = _bilinear(parts, numbers.expand_as(y), y, along)
    if mask is not None:
        picked = picked * mask.view(batch, offset_group, kh * kw, height, width)
    windows = picked.permute(1, 2, 0, 3, 4, 5).reshape(
        batch, group, channels // group * kh * kw, height * width
    )
    result = weight.reshape(group, weight.shape[0] // group, -1) @ windows
    result = result.reshape(batch, weight.shape[0], height, width)
    return result if bias is None else result + bias.view(-1, 1, 1)


def _roi_types(x: Tensor, rois: Tensor, *_: Any, **attributes: Any) -> list:
    sizes = [attributes.get("output_height", 1), attributes.get("output_width", 1)]
    return [(x.dtype, [rois.shape[0], x.shape[1], *sizes])]


@of_onnx("RoiAlign", types=_roi_types)
def roi_align(
    x: Tensor, rois: Tensor, batch_indices: Tensor, *,
    coordinate_transformation_mode: str = "half_pixel", mode: str = "avg", output_height: int = 1,
    output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0, opset: int,
) -> Tensor:  # fmt: skip
    """Give the mean or maximum of samples in each cell of a grid over regions (x1, y1, x2, y2)."""
    if opset < 16:
        coordinate_transformation_mode = "output_half_pixel"
    is_half = coordinate_transformation_mode == "half_pixel"
    shift = 0.5 if is_half else 0.0
    results = []
    for region, batch in zip(rois.unbind(0), batch_indices.unbind(0), strict=True):
        x1, y1, x2, y2 = (region * spatial_scale - shift).unbind(0)
        width, height = x2 - x1, y2 - y1
        if not is_half:
            width, height = width.clamp(min=1), height.clamp(min=1)
        counts = [
            sampling_ratio or max(1, math.ceil(float(extent) / cells))
            for extent, cells in ((height, output_height), (width, output_width))
        ]
        places = []
        for first, extent, cells, count, size in (
            (y1, height, output_height, counts[0], x.shape[2]),
            (x1, width, output_width, counts[1], x.shape[3]),
        ):
            steps = (torch.arange(cells * count, device=x.device) + 0.5) / count
            at = first + steps * extent / cells
            # Within a pixel outside of the image, the last pixel counts.
            is_near = (at >= -1) & (at <= size)
            places.append(torch.where(is_near, at.clamp(0, size - 1), -5.0))
        y, along = torch.meshgrid(*places, indexing="ij")
        if mode == "max":
            samples = _largest_corner(x, batch, y, along)
        else:
            samples = _bilinear(x, batch.long().expand_as(y), y, along)
        cells = samples.view(-1, output_height, counts[0], output_width, counts[1])
        results.append(cells.mean((2, 4)) if mode == "avg" else cells.amax((2, 4)))
    if not results:
        return x.new_zeros(0, x.shape[1], output_height, output_width)
    return torch.stack(results)


def _largest_corner(x: Tensor, batch: Tensor, y: Tensor, along: Tensor) -> Tensor:
    """Give the largest of the four weighted pixels around a place, as ONNX's maximum does."""
    height, width = x.shape[2], x.shape[3]
    image = x.index_select(0, batch.long().view(1)).squeeze(0)
    corners = []
    for i, j in itertools.product((0, 1), (0, 1)):
        row, column = y.floor() + i, along.floor() + j
        weight = (1 - (y - row).abs()) * (1 - (along - column).abs())
        is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        picked = image[:, row.clamp(0, height - 1).long(), column.clamp(0, width - 1).long()]
        corners.append(picked * torch.where(is_inside, weight, 0))
    return torch.stack(corners).amax(0)
