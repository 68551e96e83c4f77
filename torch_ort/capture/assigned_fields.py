"""Fields of objects among the arguments that forward assigns: `batch.h = self.embed(batch.x)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_ort.guards.structure import Structure, TakenObject, fields_of


class _Field(NamedTuple):
    position: int  # of the object among those of a call
    name: str
    is_tensor: bool
    constant: Any  # what is assigned in each call, if it is no tensor


class AssignedFields:
    """What a recorded forward has assigned; each call of the graph assigns its own tensors."""

    def __init__(self) -> None:
        self._fields: list[_Field] = []

    def record(self, objects: Sequence[TakenObject]) -> list[torch.Tensor]:
        """Note what has been assigned to the copies that a recording has got; give the tensors.

        Raises Unsupported for what is neither a tensor nor a constant.
        """
        assigned = [
            (i, name, value)
            for i, taken in enumerate(objects)
            for name, value in taken.assigned().items()
        ]
        tensors = [isinstance(value, torch.Tensor) for *_, value in assigned]
        self._fields = [
            _Field(i, name, is_tensor, None if is_tensor else value)
            for (i, name, value), is_tensor in zip(assigned, tensors, strict=True)
        ]
        return [value for *_, value in assigned if isinstance(value, torch.Tensor)]

    @property
    def num_tensors(self) -> int:
        """The number of tensors that a call assigns."""
        return sum(field.is_tensor for field in self._fields)

    def __bool__(self) -> bool:
        return bool(self._fields)

    def assign(self, args: tuple, kwargs: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Assign the tensors of a call, and constants, to the objects among its arguments."""
        if not self:
            return
        objects = Structure((args, kwargs), "").objects
        values = iter(tensors)
        for field in self._fields:
            value = next(values) if field.is_tensor else field.constant
            object.__setattr__(objects[field.position].value, field.name, value)

    def made(self, objects: Sequence[TakenObject]) -> list[torch.Tensor]:
        """Give the tensors that a plain call has assigned to copies of the objects."""
        return [
            fields_of(objects[field.position].made)[field.name]
            for field in self._fields
            if field.is_tensor
        ]
