"""Operators that pick, place and move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import has_attribute, of_onnx


@of_onnx("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move channels into blocks of the image; "DCR" has the places in a block first."""
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    batch, channels, height, width = x.shape
    kept = channels // blocksize**2
    blocks = x.reshape(batch, blocksize, blocksize, kept, height, width)
    moved = blocks.permute(0, 3, 4, 1, 5, 2)
    return moved.reshape(batch, kept, height * blocksize, width * blocksize)


@of_onnx("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move blocks of the image into channels; "DCR" has the places in a block first."""
    if mode == "CRD":
        return F.pixel_unshuffle(x, blocksize)
    batch, channels, height, width = x.shape
    blocks = x.reshape(
        batch, channels, height // blocksize, blocksize, width // blocksize, blocksize
    )
    moved = blocks.permute(0, 3, 5, 1, 2, 4)
    made = channels * blocksize**2
    return moved.reshape(batch, made, height // blocksize, width // blocksize)


@of_onnx("CenterCropPad", numbers=(1,))
def center_crop_pad(x: Tensor, shape: Sequence[int], *, axes: Sequence[int] = ()) -> Tensor:
    """Cut or pad axes to sizes, so that the middle stays in the middle."""
    for axis, size in zip(axes or range(x.ndim), shape, strict=True):
        spare = size - x.shape[axis]
        if spare < 0:
            x = x.narrow(axis, -spare // 2, size)
            continue
        at = 2 * (x.ndim - 1 - axis % x.ndim)
        x = F.pad(x, [0] * at + [spare // 2, spare - spare // 2])
    return x


@of_onnx("ReverseSequence")
def reverse_sequence(
    x: Tensor, sequence_lens: Tensor, *, batch_axis: int = 1, time_axis: int = 0
) -> Tensor:
    """Reverse the first elements along time, as many as each sequence of the batch has."""
    moved = x.movedim((time_axis, batch_axis), (0, 1))
    return reversed_within(moved, sequence_lens).movedim((0, 1), (time_axis, batch_axis))


def reversed_within(x: Tensor, lengths: Tensor) -> Tensor:
    """Reverse (length, batch, ...) along the first dim, each sequence within its length."""
    at = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    source = torch.where(at < lengths, lengths - 1 - at, at)
    return x.gather(0, source.view(*source.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _index(indices: Tensor, sizes: Sequence[Any]) -> tuple[Tensor, ...]:
    """Give places from the last dim of indices, where negative ones count from the end."""
    return tuple(
        torch.where(at < 0, at + size, at)
        for at, size in zip(indices.unbind(-1), sizes, strict=False)
    )


@of_onnx("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Pick the parts of x that the last dim of the indices names."""
    places = _index(indices, x.shape[batch_dims:])
    batch = []
    for i in range(batch_dims):
        at = torch.arange(x.shape[i], device=x.device)
        batch.append(at.view(*[-1 if j == i else 1 for j in range(places[0].ndim)]))
    return x[(*batch, *places)]


_SCATTERED = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}


@of_onnx("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """Write updates to the parts of a copy of x that the last dim of the indices names."""
    depth = indices.shape[-1]
    places = _index(indices, x.shape)
    if reduction == "none":
        return x.index_put(places, updates)
    if reduction == "add":
        return x.index_put(places, updates, accumulate=True)
    if reduction not in _SCATTERED:
        raise _C.UserError(f"ScatterND: reduction: got {reduction}, want none or one of ONNX's")
    # By the numbers of whole parts, as torch.index_reduce takes them.
    number = torch.zeros_like(places[0])
    for at, size in zip(places, x.shape, strict=False):
        number = number * size + at
    length = math.prod(x.shape[depth:])
    parts = x.reshape(math.prod(x.shape[:depth]), length)
    rows = updates.reshape(math.prod(indices.shape[:-1]), length)
    source = number.reshape(-1, 1).expand_as(rows)
    return parts.scatter_reduce(0, source, rows, _SCATTERED[reduction]).view(x.shape)


@of_onnx("Scatter")
def scatter(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0) -> Tensor:
    """Write updates to places along an axis of a copy of x: ScatterElements of old opsets."""
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    return x.scatter(axis, indices.long(), updates)


@of_onnx("TensorScatter")
def tensor_scatter(
    past_cache: Tensor, update: Tensor, write_indices: Tensor | None = None, *, axis: int = -2,
    mode: str = "linear",
) -> Tensor:  # fmt: skip
    """Write an update into a cache, from a place on that each row of the batch has."""
    axis = axis % past_cache.ndim
    at = torch.arange(update.shape[axis], device=update.device)
    if write_indices is not None:
        at = at + write_indices.unsqueeze(1)
    else:
        at = at.unsqueeze(0).expand(update.shape[0], -1)
    if mode == "circular":
        at = at % past_cache.shape[axis]
    sizes = [1] * update.ndim
    sizes[0], sizes[axis] = update.shape[0], update.shape[axis]
    return past_cache.scatter(axis, at.reshape(sizes).expand_as(update), update)


@of_onnx("OneHot", numbers=(1,))
def one_hot(indices: Tensor, depth: Sequence[int], values: Tensor, *, axis: int = -1) -> Tensor:
    """Give values[1] at the index along a new axis, else values[0]; others have no place."""
    count = int(depth[0]) if isinstance(depth[0], float) else depth[0]
    axis = axis % (indices.ndim + 1)
    classes = torch.arange(count, device=indices.device)
    sizes = [1] * (indices.ndim + 1)
    sizes[axis] = count
    wrapped = torch.where(indices < 0, indices + count, indices)
    is_at = wrapped.unsqueeze(axis) == classes.view(sizes)
    return torch.where(is_at, values[1], values[0])


@of_onnx("Compress", types=lambda x, condition, *, axis=None: [
    (x.dtype, [None] if axis is None else
     [None if i == axis % x.ndim else size for i, size in enumerate(x.shape)])
])  # fmt: skip
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """Keep what has a true condition; conditions may be fewer than elements."""
    if axis is None:
        x, axis = x.flatten(), 0
    return x.index_select(axis, condition.nonzero().squeeze(1))


def _unique_types(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> list:
    sizes: list[Any] = [None]
    if axis is not None:
        sizes = [None if i == axis % x.ndim else size for i, size in enumerate(x.shape)]
    rest = (torch.int64, [None])
    inverse = (torch.int64, [x.numel() if axis is None else x.shape[axis]])
    return [(x.dtype, sizes), rest, inverse, rest]


@of_onnx("Unique", types=_unique_types)
def unique(
    x: Tensor, *, axis: int | None = None, sorted: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give what differs along an axis, first places, where each element is, and counts.

    What is not sorted stands in the order in which it first occurs.
    """
    _, inverse, counts = torch.unique(
        x, sorted=True, return_inverse=True, return_counts=True, dim=axis
    )
    inverse = inverse.flatten()
    places = torch.arange(inverse.numel(), device=x.device)
    first = torch.full_like(counts, inverse.numel()).scatter_reduce(0, inverse, places, "amin")
    if not sorted:
        order = first.argsort()
        rank = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=x.device)
        )
        first, counts, inverse = first[order], counts[order], rank[inverse]
    # What is picked carries gradients, and what torch.unique gives does not.
    found = x.flatten()[first] if axis is None else x.index_select(axis, first)
    return found, first, inverse, counts


@of_onnx("TopK", numbers=(1,))
def top_k(
    x: Tensor, k: Sequence[int], *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    """Give the k largest or smallest along an axis in order, the first of equal ones first."""
    order = torch.argsort(x, dim=axis, descending=bool(largest), stable=True)
    places = order.narrow(axis, 0, k[0])
    return x.gather(axis, places), places


def _last_index(find: str) -> Any:
    def last(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int) -> Tensor:
        flipped = getattr(x.flip(axis), find)(axis, keepdim=bool(keepdims))
        return x.shape[axis] - 1 - flipped

    last.__name__ = last.__qualname__ = f"{find}_last"
    return last


argmax_last = of_onnx("ArgMax", when=has_attribute("select_last_index", 1))(_last_index("argmax"))
argmin_last = of_onnx("ArgMin", when=has_attribute("select_last_index", 1))(_last_index("argmin"))


@of_onnx("Col2Im", numbers=(1, 2))
def col2im(
    x: Tensor, image_shape: Sequence[int], block_shape: Sequence[int], *,
    dilations: Sequence[int] = (), pads: Sequence[int] = (), strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Add blocks (batch, channels · block, blocks) up to images of any number of dims."""
    rank = len(image_shape)
    dilations, strides = list(dilations) or [1] * rank, list(strides) or [1] * rank
    pads = list(pads) or [0] * 2 * rank
    padded = [image_shape[i] + pads[i] + pads[i + rank] for i in range(rank)]
    counts = [
        (padded[i] - dilations[i] * (block_shape[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    ]
    batch, channels = x.shape[0], x.shape[1] // math.prod(block_shape)
    blocks = x.reshape(batch, channels, *block_shape, *counts)
    # The place of each element of each block in the padded image.
    place = torch.zeros([1] * 2 * rank, dtype=torch.int64, device=x.device)
    for i in range(rank):
        within = torch.arange(block_shape[i], device=x.device) * dilations[i]
        start = torch.arange(counts[i], device=x.device) * strides[i]
        sizes = [1] * (2 * rank)
        sizes[i], sizes[rank + i] = block_shape[i], counts[i]
        place = place * padded[i] + (within.unsqueeze(1) + start).reshape(sizes)
    image = x.new_zeros(batch, channels, math.prod(padded))
    image = image.index_add(2, place.flatten(), blocks.flatten(2))
    image = image.reshape(batch, channels, *padded)
    for i in range(rank):
        image = image.narrow(2 + i, pads[i], image_shape[i])
    return image


@of_onnx("NonMaxSuppression", numbers=(2, 3, 4), types=lambda *inputs, center_point_box=0: [
    (torch.int64, [None, 3])
])  # fmt: skip
def non_max_suppression(
    boxes: Tensor, scores: Tensor, max_output_boxes_per_class: Sequence[int] | None = None,
    iou_threshold: Sequence[float] | None = None, score_threshold: Sequence[float] | None = None, *,
    center_point_box: int = 0,
) -> Tensor:  # fmt: skip
    """Pick boxes by descending score, and leave out what overlaps one that is picked.

    Gives (batch, class, box) of those that stay.
    """
    most = int(max_output_boxes_per_class[0]) if max_output_boxes_per_class else 0
    if center_point_box:
        x, y, width, height = boxes.unbind(-1)
        corners = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    else:
        y1, x1, y2, x2 = boxes.unbind(-1)
        corners = [x1.minimum(x2), y1.minimum(y2), x1.maximum(x2), y1.maximum(y2)]
    left, top, right, bottom = corners
    wide = right.unsqueeze(2).minimum(right.unsqueeze(1)) - left.unsqueeze(2).maximum(
        left.unsqueeze(1)
    )
    high = bottom.unsqueeze(2).minimum(bottom.unsqueeze(1)) - top.unsqueeze(2).maximum(
        top.unsqueeze(1)
    )
    shared = wide.clamp(min=0) * high.clamp(min=0)
    areas = (right - left) * (bottom - top)
    union = areas.unsqueeze(2) + areas.unsqueeze(1) - shared
    overlaps = torch.where(union > 0, shared / union, 0) > (
        iou_threshold[0] if iou_threshold else 0.0
    )
    picked = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            of_kind = scores[batch, kind]
            is_free = torch.ones_like(of_kind, dtype=torch.bool)
            if score_threshold:
                is_free = of_kind > score_threshold[0]
            chosen: list[int] = []
            for box in torch.argsort(of_kind, descending=True, stable=True).tolist():
                if len(chosen) >= most:
                    break
                if bool(is_free[box]):
                    chosen.append(box)
                    is_free = is_free & ~overlaps[batch, box]
            picked += [[batch, kind, box] for box in chosen]
    return torch.tensor(picked, dtype=torch.int64, device=scores.device).reshape(-1, 3)


@of_onnx("NonZero", types=lambda x: [(torch.int64, [max(x.ndim, 1), None])])
def non_zero(x: Tensor) -> Tensor:
    """Give the places of elements that are not 0, (dims, count), row by row."""
    return (x.reshape(1) if x.ndim == 0 else x).nonzero().t()


@of_onnx("Pad", numbers=(1, 3), when=has_attribute("mode", b"edge", b"reflect", b"wrap"))
def pad(
    x: Tensor, pads: Sequence[int] | None = None, constant_value: Tensor | None = None,
    axes: Sequence[int] | None = None, *, mode: str,
) -> Tensor:  # fmt: skip
    """Pad each axis by what is at its ends: the last element, a reflection, or the other end."""
    amounts = list(pads or [])
    chosen = list(axes) if axes else list(range(x.ndim))
    for i, axis in enumerate(chosen):
        before, behind = amounts[i], amounts[i + len(chosen)]
        if isinstance(before, int) and isinstance(behind, int) and before == behind == 0:
            continue
        if not (isinstance(before, int) and isinstance(behind, int) and min(before, behind) >= 0):
            # What is negative cuts first, and the rest is padded by what remains.
            start, end = torch.sym_max(-before, 0), torch.sym_max(-behind, 0)
            x = x.narrow(axis, start, x.shape[axis] - start - end)
            before, behind = torch.sym_max(before, 0), torch.sym_max(behind, 0)
        size = x.shape[axis]
        at = torch.arange(-before, size + behind, device=x.device)
        if mode == "edge":
            at = at.clamp(0, size - 1)
        elif mode == "wrap":
            at = at % size
        else:
            at = at % torch.sym_max(2 * size - 2, 1)
            at = torch.minimum(at, (2 * size - 2 - at).abs())
        x = x.index_select(axis, at)
    return x
