"""Calls of operators, of PyTorch's own samples, with their tensors laid out in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

LAYOUTS = ("as given", "transposed", "strided", "empty", "written", "copy written")

_WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Case:
    """One call of an operator: a function of tensors alone, and the tensors.

    `layout` is how these lie in memory or what is done to them: "written" is the operator's form in
    place on an argument, "copy written" that on a copy of one.
    """

    operator: Any  # an OpInfo
    dtype: torch.dtype
    sample: int
    layout: str
    function: Callable[..., Any]
    tensors: Sequence[torch.Tensor]

    def __str__(self) -> str:
        name = self.operator.formatted_name
        return f"{name} {str(self.dtype).removeprefix('torch.')} {self.sample} {self.layout}"

    def fresh(self) -> list[torch.Tensor]:
        """Give the tensors anew, as leaves of autograd."""
        return [_copy(tensor, tensor.dtype) for tensor in self.tensors]

    def wide(self) -> list[torch.Tensor]:
        """Give the tensors anew, in double precision."""
        return [_copy(tensor, _WIDE.get(tensor.dtype, tensor.dtype)) for tensor in self.tensors]


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = tensor.detach()
    if tensor.layout != torch.strided or torch._debug_has_internal_overlap(values) == 1:
        copied = values.clone().to(dtype)
    else:
        copied = torch.empty_strided(values.size(), values.stride(), dtype=dtype)
        copied.untyped_storage().fill_(0)  # as_strided may read what lies between
        copied.copy_(values)
    return copied.requires_grad_(tensor.requires_grad)


def cases(
    operator: Any, dtype: torch.dtype, layouts: Sequence[str] = LAYOUTS, max_samples: int = 1000
) -> Iterator[Case]:
    """Give calls of an operator; its samples draw their numbers from torch's generator."""
    has_gradient = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = operator.sample_inputs("cpu", dtype, requires_grad=has_gradient)
    for number, sample in enumerate(islice(samples, max_samples)):
        for layout in layouts:
            made = _case(operator, dtype, number, layout, sample)
            if made is not None:
                yield made


def _case(operator: Any, dtype: torch.dtype, number: int, layout: str, sample: Any) -> Case | None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    target = operator
    if "written" in layout:
        target = operator.inplace_variant
        if target is None or sample.broadcasts_input or not (places and places[0] == 0):
            return None
    if layout == "written":
        tensors[0] = tensors[0].detach()
    elif layout in _LAID_OUT:
        tensors = list(map(_LAID_OUT[layout], tensors))
        if all(tensor is leaves[i] for i, tensor in zip(places, tensors, strict=True)):
            return None

    def function(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        # An operator without tensors gets one all the same, which tells the device.
        for i, tensor in zip(places, tensors, strict=False):
            given[i] = tensor
        if layout == "copy written":
            given[0] = given[0].clone()
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        return target(first, *args, **kwargs)

    return Case(operator, dtype, number, layout, function, tensors or [torch.zeros(())])


def _leaf(laid_out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return laid_out.detach().requires_grad_(tensor.requires_grad)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor with its last two dims swapped in memory."""
    if tensor.dim() < 2 or tensor.layout != torch.strided:
        return tensor
    return _leaf(tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2), tensor)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor with gaps between its elements."""
    if tensor.dim() < 1 or tensor.layout != torch.strided:
        return tensor
    return _leaf(tensor.detach().repeat_interleave(2, -1)[..., ::2], tensor)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Take all elements along the first dim away."""
    if tensor.dim() < 1 or tensor.layout != torch.strided or not tensor.numel():
        return tensor
    return _leaf(tensor.detach()[:0].clone(), tensor)


_LAID_OUT = {"transposed": _transposed, "strided": _strided, "empty": _empty}
