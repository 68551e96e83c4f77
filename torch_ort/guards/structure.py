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

from torch_ort import _C
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
    their attributes if tensors hang there, and are constants if not. Elsewhere objects of Python's
    own classes are taken apart (see `TakenObject`), and all others raise UnknownType.
    `numbers` names the places where a float or an integer may differ from call to call: there it is
    a leaf, and calls bring it as a 0-d tensor, of `float_dtype` if it is a float. `labels` gives
    better names to some places. `number_tensor` gives a 0-d tensor of a number in a result that
    differs from call to call, or None.
    """

    def __init__(
        self,
        value: Any,
        name: str,
        *,
        keeps_others: bool = False,
        numbers: frozenset[str] = frozenset(),
        float_dtype: torch.dtype = torch.float64,
        labels: Mapping[str, str] | None = None,
        number_tensor: Callable[[Any], torch.Tensor | None] = lambda value: None,
    ) -> None:
        self._number_tensor = number_tensor
        self.leaves: list[torch.Tensor | int | float] = []
        self.names: list[str] = []  # of the leaves
        self.numbers: dict[int, torch.dtype] = {}  # leaves that are tensors later: their dtypes
        self.constants: dict[str, Any] = {}  # by name
        self.objects: list[TakenObject] = []
        self._around: list[int] = []  # ids of the objects that are being taken apart
        self._keeps_others = keeps_others
        self._open = numbers
        self._float_dtype = float_dtype
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
            # Results are not compared, and those of a capture tell no strides.
            order = [] if self._keeps_others else _C.memory_order(value)
            return _tensor_description(value, order), next
        if name in self._open and type(value) in (int, float):
            dtype = self._float_dtype if type(value) is float else torch.int64
            self.numbers[len(self.leaves)] = dtype
            self._add_leaf(value, name)
            return ("number", dtype), next
        tensor = self._number_tensor(value)
        if tensor is not None:
            self._add_leaf(tensor, name)
            return ("number", tensor.dtype), lambda leaves: next(leaves).item()
        if type(value) in (int, torch.SymInt):
            self._add_leaf(value, name)
            return ("integer",), next
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise Unsupported(
                f"{name}: a data-dependent number, want a tensor: return it instead of its value"
            )
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
        if is_data_object(value):
            return self._take_object(value, name)
        raise UnknownType(
            f"{name}: got {type(value).__name__}, want tensors, numbers, strings, None, and lists, "
            "tuples, mappings and plain objects of them"
        )

    def _take_object(self, value: Any, name: str) -> tuple[tuple, Callable]:
        if id(value) in self._around:
            raise UnknownType(f"{name}: got {type(value).__name__}, which refers to itself")
        self._around.append(id(value))
        taken = TakenObject(value, name)
        try:
            self._take_fields(taken, value)
        finally:
            self._around.pop()
        self.objects.append(taken)
        return taken.description, taken.rebuild

    def _take_fields(self, taken: TakenObject, value: Any) -> None:
        for key, part in fields_of(value).items():
            count = len(self.leaves)
            try:
                description, rebuild = self._take(part, f"{taken.name}.{key}")
            except UnknownType as error:
                if len(self.leaves) > count:  # a part of this field holds tensors
                    raise
                taken.unknown[key] = str(error)
                continue
            taken.add(key, description, rebuild, len(self.leaves) > count)

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


class TakenObject:
    """An object of a class that this package does not know, taken apart by its fields.

    A recording gets a copy of it, and tells which fields it has read. Fields without tensors and
    numbers that were not read are not compared.
    """

    def __init__(self, value: Any, name: str) -> None:
        self.name = name
        self.made: Any = None  # the last copy
        self._before: dict[str, Any] = {}  # its fields, as they were made
        self.unknown: dict[str, str] = {}  # fields of which nothing can be compared: why
        self._value = value
        self._keys: list[str] = []
        self._parts: list[tuple] = []
        self._rebuilds: list[tuple[str, Callable[[Iterator[Any]], Any]]] = []
        self._with_leaves: set[str] = set()
        self.description = ("attributes", type(value), self._keys, self._parts)

    def add(self, key: str, description: tuple, rebuild: Callable, has_leaves: bool) -> None:
        """Add a field."""
        self._keys.append(key)
        self._parts.append(description)
        self._rebuilds.append((key, rebuild))
        if has_leaves:
            self._with_leaves.add(key)

    def rebuild(self, leaves: Iterator[Any]) -> Any:
        """Make a copy with other leaves."""
        kind = type(self._value)
        new = kind.__new__(kind)
        fields = fields_of(self._value)
        fields |= {key: rebuild(leaves) for key, rebuild in self._rebuilds}
        for key, part in fields.items():
            object.__setattr__(new, key, part)
        self.made, self._before = new, fields
        return new

    @property
    def value(self) -> Any:
        """The object itself."""
        return self._value

    def assigned(self) -> dict[str, Any]:
        """Give the fields of the last copy that have been assigned.

        Raises Unsupported for one that is neither a tensor nor a constant.
        """
        now = fields_of(self.made)
        assigned = {
            key: value for key, value in now.items() if value is not self._before.get(key, self)
        }
        refused = [key for key in self._before if key not in now]
        refused += [
            key for key, value in assigned.items()
            if not isinstance(value, torch.Tensor | bool | int | float | str | None)
        ]  # fmt: skip
        if refused:
            raise Unsupported(
                f"forward assigns field {refused[0]!r} of argument '{self.name}', which a captured "
                "graph cannot do"
            )
        return assigned

    def forget(self) -> None:
        """Let go of the last copy."""
        self.made, self._before = None, {}

    def compare_only(self, read: set[str]) -> None:
        """Compare, of the fields without leaves, only those that were read.

        Raises Unsupported where one of them cannot be compared.
        """
        for key in sorted(read & self.unknown.keys()):
            raise Unsupported(self.unknown[key])
        kept = [
            (key, part)
            for key, part in zip(self._keys, self._parts, strict=True)
            if key in self._with_leaves or key in read
        ]
        self._keys[:] = [key for key, _ in kept]
        self._parts[:] = [part for _, part in kept]


def is_data_object(value: Any) -> bool:
    """Tell whether a value is an object of a class of Python's, which consists of its fields."""
    kind = type(value)
    if isinstance(value, _NO_DATA) or callable(value):
        return False
    has_fields = hasattr(value, "__dict__") or any(
        "__slots__" in vars(each) for each in kind.__mro__
    )
    return has_fields and (kind.__new__ is object.__new__ or kind is types.SimpleNamespace)


_NO_DATA = (torch.nn.Module, types.ModuleType, torch.Generator)


def fields_of(value: Any) -> dict[str, Any]:
    """Give the fields of an object, those in slots among them, without calling its code."""
    fields = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__":
                try:
                    fields.setdefault(name, member.__get__(value))
                except AttributeError:  # the slot is empty
                    continue
    try:
        return fields | object.__getattribute__(value, "__dict__")
    except AttributeError:  # all fields are in slots
        return fields


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


def _tensor_description(value: torch.Tensor, order: list[int]) -> tuple:
    return ("tensor", value.dtype, value.device, value.dim(), value.requires_grad, order)


def is_dense(value: torch.Tensor) -> bool:
    """Tell whether a tensor's numbers lie without gaps or overlaps."""
    order = _C.memory_order(value)
    return (value.permute(order) if order else value).is_contiguous()
