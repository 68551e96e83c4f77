"""The nested structure of arguments and results, and the tensors in it.

A description is plain data that `_C.CallGuard` compares calls with. Tensors and integers are
leaves; None, bools, strings and floats are constants of a structure.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torch_ort._C import Unsupported

# Types of values that are part of the structure: a call with another value has another structure.
_CONSTANTS = (
    type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format,
    torch.layout, enum.Enum, slice, range, type, type(...),
)  # fmt: skip


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class UnknownType(TypeError):
    """A value that has no place in a structure; the words say where and what."""


class Structure:
    """A value taken apart: `leaves` in order, `description` for comparing, `rebuild` to undo it.

    A module may give anything: where `keeps_others`, objects of other types are taken apart by
    their attributes if tensors hang there, and are constants if not. Elsewhere they raise
    UnknownType.
    `floats` names the places where a float is a leaf, later a tensor of `float_dtype`; `labels`
    gives better names to some places.
    """

    def __init__(
        self,
        value: Any,
        name: str,
        *,
        keeps_others: bool = False,
        floats: frozenset[str] = frozenset(),
        float_dtype: torch.dtype | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.leaves: list[torch.Tensor | int | float] = []
        self.names: list[str] = []  # of the leaves
        self.constants: dict[str, Any] = {}  # by name
        self._keeps_others = keeps_others
        self._floats = floats
        self.float_dtype = float_dtype or torch.get_default_dtype()
        self._labels = labels or {}
        self.description, self._rebuild = self._take(value, name)

    def rebuild(self, leaves: Any) -> Any:
        """Rebuild the value with other leaves."""
        return self._rebuild(iter(leaves))

    def _take(self, value: Any, name: str) -> tuple[tuple, Callable[[Iterator[Any]], Any]]:
        name = self._labels.get(name, name)
        if isinstance(value, torch.Tensor):
            if not self._keeps_others and not plain_tensor(value):
                raise UnknownType(f"{name}: got {_kind_of(value)}, want a plain tensor")
            self._add_leaf(value, name)
            return _tensor_description(value), next
        if type(value) in (int, torch.SymInt):
            self._add_leaf(value, name)
            return ("integer",), next
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise Unsupported(
                f"{name}: a data-dependent number, want a tensor: return it instead of its value"
            )
        if type(value) is float and name in self._floats:
            self._add_leaf(value, name)
            return ("float", self.float_dtype), next
        if isinstance(value, _CONSTANTS):
            self.constants[name] = value
            return ("constant", value), lambda leaves: value
        if isinstance(value, list | tuple):
            return self._take_sequence(value, name)
        if isinstance(value, Mapping):
            keys = list(value)
            parts = [self._take(value[key], f"{name}[{key!r}]") for key in keys]
            return self._container("mapping", value, keys, parts, _set_item)
        if dataclasses.is_dataclass(value):
            return self._take_attributes(
                value, name, [field.name for field in dataclasses.fields(value)]
            )
        if self._keeps_others:
            if not _holds_tensor(value, set()):
                return ("constant", value), lambda leaves: value
            return self._take_attributes(value, name, list(vars(value)))
        raise UnknownType(
            f"{name}: got {type(value).__name__}, want tensors, numbers, strings, None, and lists, "
            "tuples, mappings and dataclasses of them"
        )

    def _add_leaf(self, value: Any, name: str) -> None:
        self.leaves.append(value)
        self.names.append(name)

    def _take_sequence(self, value: list | tuple, name: str) -> tuple[tuple, Callable]:
        kind = type(value)
        parts = [self._take(item, f"{name}[{i}]") for i, item in enumerate(value)]
        make = getattr(kind, "_make", kind)  # of a namedtuple
        rebuilds = [rebuild for _, rebuild in parts]
        descriptions = tuple(description for description, _ in parts)
        return (
            ("sequence", kind, (), descriptions),
            lambda leaves: make([rebuild(leaves) for rebuild in rebuilds]),
        )

    def _take_attributes(self, value: Any, name: str, keys: list[str]) -> tuple[tuple, Callable]:
        parts = [self._take(getattr(value, key), f"{name}.{key}") for key in keys]
        return self._container("attributes", value, keys, parts, object.__setattr__)

    def _container(
        self, kind: str, value: Any, keys: list, parts: list[tuple], put: Callable
    ) -> tuple[tuple, Callable]:
        # A copy of the container itself, so that what it has besides its items is kept.
        empty = copy.copy(value)
        for key in keys:
            put(empty, key, None)
        rebuilds = [(key, rebuild) for key, (_, rebuild) in zip(keys, parts, strict=True)]

        def rebuild_all(leaves: Iterator[Any]) -> Any:
            new = copy.copy(empty)
            for key, rebuild in rebuilds:
                put(new, key, rebuild(leaves))
            return new

        descriptions = tuple(description for description, _ in parts)
        return (kind, type(value), tuple(keys), descriptions), rebuild_all


def _kind_of(value: torch.Tensor) -> str:
    """Say what makes a tensor none of the plain ones."""
    if type(value) not in _PLAIN:
        return f"the tensor subclass {type(value).__name__}"
    if value.layout != torch.strided:
        return f"a tensor of layout {value.layout}"
    return "a quantized tensor" if value.is_quantized else "a conjugate or negative view"


def plain_tensor(value: torch.Tensor) -> bool:
    """Tell whether a tensor is of a plain class and has a plain layout (`has_plain_layout`)."""
    return type(value) in _PLAIN and has_plain_layout(value)


def has_plain_layout(value: torch.Tensor) -> bool:
    """Tell whether a tensor is strided, and neither conjugate, negative nor quantized."""
    return value.layout == torch.strided and not (
        value.is_conj() or value.is_neg() or value.is_quantized
    )


def plain_parameter(value: torch.Tensor) -> bool:
    """Tell whether a tensor of a module is plain; a class may mark it that changes nothing."""
    kind, parameter = type(value), torch.nn.Parameter
    is_marked = (
        issubclass(kind, parameter)
        and kind.__torch_function__ == parameter.__torch_function__
        and kind.__torch_dispatch__ == parameter.__torch_dispatch__
    )
    return plain_tensor(value) or (is_marked and plain_tensor(value.detach()))


def _holds_tensor(value: Any, seen: set[int]) -> bool:
    """Tell whether an object holds a tensor at any depth; modules and classes do not count."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, torch.nn.Module | type | types.ModuleType) or id(value) in seen:
        return False
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif not callable(value):
        parts = list(getattr(value, "__dict__", {}).values())
    return any(_holds_tensor(part, seen) for part in parts)


def _set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _tensor_description(value: torch.Tensor) -> tuple:
    return (
        "tensor", value.dtype, value.device, value.dim(), value.requires_grad, dense_format(value),
    )  # fmt: skip


def is_dense(value: torch.Tensor) -> bool:
    """Tell whether a tensor's numbers lie in one of the orders that calls are compared by."""
    return value.is_contiguous() or dense_format(value) != "contiguous"


def dense_format(value: torch.Tensor) -> str:
    """Name the order in which a tensor's numbers lie; "contiguous" too where they have none."""
    if value.layout == torch.strided and not value.is_contiguous():
        if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
            return "channels_last"
        if value.dim() == 5 and value.is_contiguous(memory_format=torch.channels_last_3d):
            return "channels_last_3d"
    return "contiguous"
