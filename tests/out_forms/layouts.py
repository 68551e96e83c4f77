"""Other layouts of the arguments of a call, and of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.out_forms.proof import Call


def dense(tensor: Tensor) -> Tensor:
    """Give it row-major."""
    return tensor.contiguous()


def transposed(tensor: Tensor) -> Tensor:
    """Give it with the dims in memory the other way round."""
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


def sliced(tensor: Tensor) -> Tensor:
    """Give it as every second element of longer rows, not from the first one on."""
    wide = tensor.new_zeros([*tensor.shape[:-1], 2 * (tensor.shape[-1] if tensor.dim() else 1) + 3])
    part = wide[..., 3::2] if tensor.dim() else wide[3]
    return part.copy_(tensor)


def channels_last(tensor: Tensor) -> Tensor:
    """Give an image or a volume with its channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.dim(), torch.contiguous_format))


def broadcast(tensor: Tensor) -> Tensor:
    """Give its first row in place of all others, kept once."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    first = (slice(0, 1),) * max(1, tensor.dim() - 1)
    return tensor[first].contiguous().expand(tensor.shape)


def lazy(tensor: Tensor) -> Tensor:
    """Give it as a view that says to conjugate, or to negate, what it shows."""
    if tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    dense, transposed, sliced, channels_last, broadcast, lazy,
)  # fmt: skip


def variants(call: Call, each: bool) -> Iterator[tuple[str, Call]]:
    """Give a call as it is, with all arguments in another layout, or with `each` one alone in it.

    Where all have one shape, also without elements, and with 0 dims. A 0-d tensor beside others is
    also given as a number, which takes no part in type promotion.
    """
    yield "as it is", call
    tensors = call.tensors()
    numbers = range(min(len(tensors), 4)) if each and len(tensors) > 1 else ()
    for change in CHANGES:
        name = change.__name__
        yield f"all {name}", call.replace(lambda _, t, change=change: change(t))
        for number in numbers:
            yield (
                f"argument {number} {name}",
                call.replace(lambda i, t, n=number, change=change: change(t) if i == n else t),
            )
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) == 1 and tensors[0].dim() > 0 and tensors[0].numel() > 0:
        yield "empty", call.replace(lambda _, t: t[:0])
        yield "0-d", call.replace(lambda _, t: t.reshape(-1)[0].clone())
    for number, tensor in enumerate(tensors):
        if tensor.dim() == 0 and len(tensors) > 1:
            yield (
                f"argument {number} a number",
                call.replace(lambda i, t, n=number: t.item() if i == n else t),
            )


def as_given(result: Tensor) -> tuple[int, ...]:
    """Choose the strides that the functional form has chosen."""
    return result.stride()


def row_major(result: Tensor) -> tuple[int, ...]:
    """Choose rows one after the other."""
    return _strides(result.shape)


def column_major(result: Tensor) -> tuple[int, ...]:
    """Choose the strides of a matrix in Fortran."""
    return tuple(reversed(_strides(result.shape[::-1])))


def part_of_rows(result: Tensor) -> tuple[int, ...]:
    """Choose the strides of a part of a wider tensor."""
    return _strides([*result.shape[:-1], result.shape[-1] + 3]) if result.dim() else ()


def part_of_columns(result: Tensor) -> tuple[int, ...]:
    """Choose the strides of a part of a taller tensor in Fortran's order."""
    if not result.dim():
        return ()
    return tuple(reversed(_strides([*result.shape[:0:-1], result.shape[0] + 3])))


def _strides(sizes: list[int] | torch.Size) -> tuple[int, ...]:
    return torch.empty(tuple(sizes), device="meta").stride()


OTHER_ORDERS = (as_given, column_major)
PARTS = (part_of_rows, part_of_columns)
