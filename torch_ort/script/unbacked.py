"""Data-dependent numbers of a script, which tensors without dims represent in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ort.core.refusals import HandOver
from torch_ort.record.bodies import recording

_KINDS = (torch.bool, torch.int64, torch.float64)  # the widest is last


def _binary(function: Callable[..., torch.Tensor], mirrored: bool = False) -> Callable[..., Any]:
    def work(self: UnbackedNumber, other: Any) -> Any:
        tensor = number_tensor(other)
        if tensor is None:
            return NotImplemented
        operands = (tensor, self.tensor()) if mirrored else (self.tensor(), tensor)
        dtype = max((operand.dtype for operand in operands), key=_KINDS.index)
        return UnbackedNumber(function(*(operand.to(dtype) for operand in operands)))

    return work


def _both_ways(function: Callable[..., torch.Tensor]) -> tuple[Any, Any]:
    return _binary(function), _binary(function, mirrored=True)


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() / b.double()


def _floor_quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point() or b.is_floating_point():
        return torch.floor(_quotient(a, b))
    return torch.div(a, b, rounding_mode="floor")


class UnbackedNumber:
    """A bool, an integer or a float: a tensor of bool, int64 or float64 on the CPU.

    Arithmetic on such numbers gives others; asking for the value of one raises HandOver.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def tensor(self) -> torch.Tensor:
        """Give the tensor."""
        return self._tensor

    def to(self, dtype: torch.dtype) -> UnbackedNumber:
        """Give it as a number of another kind."""
        return self if self._tensor.dtype == dtype else UnbackedNumber(self._tensor.to(dtype))

    def _ask(self) -> Any:
        raise HandOver("the script asks for a number that depends on data")

    __bool__ = __int__ = __float__ = __index__ = __hash__ = _ask
    __add__, __radd__ = _both_ways(torch.add)
    __sub__, __rsub__ = _both_ways(torch.sub)
    __mul__, __rmul__ = _both_ways(torch.mul)
    __truediv__, __rtruediv__ = _both_ways(_quotient)
    __floordiv__, __rfloordiv__ = _both_ways(_floor_quotient)
    __mod__, __rmod__ = _both_ways(torch.remainder)
    __and__, __rand__ = _both_ways(torch.bitwise_and)
    __or__, __ror__ = _both_ways(torch.bitwise_or)
    __xor__, __rxor__ = _both_ways(torch.bitwise_xor)
    __eq__ = _binary(torch.eq)
    __ne__ = _binary(torch.ne)
    __lt__ = _binary(torch.lt)
    __le__ = _binary(torch.le)
    __gt__ = _binary(torch.gt)
    __ge__ = _binary(torch.ge)

    def __neg__(self) -> UnbackedNumber:
        return UnbackedNumber(torch.neg(self._tensor))

    def __abs__(self) -> UnbackedNumber:
        return UnbackedNumber(torch.abs(self._tensor))


def number_tensor(value: Any) -> torch.Tensor | None:
    """Give a number as a tensor without dims; None for anything else."""
    # An UnbackedNumber, or a size that a trace has made a tensor.
    if hasattr(value, "tensor"):
        return value.tensor()
    if isinstance(value, bool | torch.SymBool):
        # A condition on sizes becomes a guard.
        return torch.scalar_tensor(bool(value), dtype=torch.bool)
    if isinstance(value, int | torch.SymInt):
        return torch.scalar_tensor(value, dtype=torch.int64)
    if isinstance(value, float | torch.SymFloat):
        return torch.scalar_tensor(value, dtype=torch.float64)
    return None


def unbacked_number(value: torch.Tensor) -> UnbackedNumber | None:
    """Give the number in a tensor of one element; None where the recording can do without it."""
    if recording() is None or value.is_complex() or not all(size == 1 for size in value.shape):
        return None
    dtype = torch.int64
    if value.is_floating_point() or value.dtype == torch.bool:
        dtype = torch.float64 if value.is_floating_point() else torch.bool
    return UnbackedNumber(value.reshape(()).to("cpu", dtype))


def like_number(value: UnbackedNumber, operand: torch.Tensor) -> torch.Tensor:
    """Give the tensor that takes part in an operation with another as the number would."""
    tensor = value.tensor()
    operand_kind = 2 if operand.is_floating_point() else int(operand.dtype != torch.bool)
    if operand.is_complex() or _KINDS.index(tensor.dtype) <= operand_kind:
        return tensor.to(operand.dtype)
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def selected(tensor: torch.Tensor, dim: int, index: UnbackedNumber) -> torch.Tensor:
    """Give `tensor.select(dim, index)`."""
    place = index.tensor()
    place = torch.where(place < 0, place + tensor.shape[dim], place)
    return tensor.index_select(dim, place.reshape(1)).squeeze(dim)
