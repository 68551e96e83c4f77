"""The arguments of a Function's call, divided into tensors, sizes and constants of the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ort.pytorch.module_compat import pytree
from torch_ort.rules.numbers import node_of_number, number_tensor

_DIFFERING = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Hole:
    """A place in the arguments that a tensor or a size of each call fills."""

    def __init__(self, index: int, is_size: bool) -> None:
        self.index = index
        self.is_size = is_size


class FloatHole(Hole):
    """A place in the arguments that a float of each call fills, which comes as a 0-d tensor."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(index, is_size=False)
        self.value = value  # in the call that is recorded


class Arguments:
    """A call's arguments. `tensors` are those that autograd sees, then those inside of containers.

    `floats` are 0-d tensors of floats that differ from call to call; they come after `tensors`.
    `values` has one entry for each argument: a Hole, a constant, or a container of both.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.tensors: list[torch.Tensor] = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.num_seen = len(self.tensors)  # the number of tensors that autograd sees
        self.sizes: list[torch.SymInt] = []
        self.floats: list[torch.Tensor] = []
        seen = iter(range(self.num_seen))
        self.values = [
            Hole(next(seen), False) if isinstance(arg, torch.Tensor) else self._take(arg)
            for arg in args
        ]
        self.convention = "".join(
            "d" if isinstance(arg, torch.Tensor) else "c" for arg in args
        )  # "d" for tensors and "c" for constants, as in ONNX Runtime Training

    def _take(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return Hole(len(self.tensors) - 1, False)
        if isinstance(value, torch.SymInt):
            self.sizes.append(value)
            return Hole(len(self.sizes) - 1, True)
        if isinstance(value, torch.SymBool):
            return bool(value)
        if isinstance(value, torch.SymFloat):
            number = node_of_number(value)
            if number is None or not number.is_open:
                return float(value)
            self.floats.append(number_tensor(value))
            return FloatHole(len(self.floats) - 1, number.value)
        if isinstance(value, list | tuple | dict):
            leaves, spec = pytree.tree_flatten(value)
            if any(isinstance(leaf, _DIFFERING) for leaf in leaves):
                return pytree.tree_unflatten([self._take(leaf) for leaf in leaves], spec)
        return value

    def key(self) -> tuple:
        """Give a value that is equal for arguments of equal constants and equal form."""
        return tuple(_key(value) for value in self.values)

    def with_recorded_floats(self) -> Arguments:
        """Give these arguments with the floats of the recorded call as constants."""
        made = copy.copy(self)
        made.floats = []
        made.values = [
            pytree.tree_map(lambda leaf: leaf.value if isinstance(leaf, FloatHole) else leaf, value)
            if _has_hole(value)
            else value
            for value in self.values
        ]
        return made

    def filler(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Give a callable of tensors, floats and sizes that calls `call` with all arguments."""
        if self.floats:
            return self._filler_with_floats(call)
        values = self.values
        num_tensors = len(self.tensors)

        def index_of(hole: Hole) -> int:
            return hole.index + (num_tensors if hole.is_size else 0)

        places = [(i, index_of(value)) for i, value in enumerate(values) if isinstance(value, Hole)]
        if len(places) == len(values) and all(place == index for place, index in places):
            return call
        trees = [i for i, value in enumerate(values) if _has_hole(value) and i not in dict(places)]

        def run(*given: Any) -> Any:
            args = list(values)
            for place, index in places:
                args[place] = given[index]
            for place in trees:
                args[place] = pytree.tree_map(
                    lambda leaf: given[index_of(leaf)] if isinstance(leaf, Hole) else leaf,
                    values[place],
                )
            return call(*args)

        return run

    def _filler_with_floats(self, call: Callable[..., Any]) -> Callable[..., Any]:
        values = self.values
        first_float = len(self.tensors)
        first_size = first_float + len(self.floats)

        def run(*given: Any) -> Any:
            def fill(leaf: Any) -> Any:
                if isinstance(leaf, FloatHole):
                    return given[first_float + leaf.index].item()
                if isinstance(leaf, Hole):
                    return given[leaf.index + (first_size if leaf.is_size else 0)]
                return leaf

            return call(*(pytree.tree_map(fill, v) if _has_hole(v) else v for v in values))

        return run


def _has_hole(value: Any) -> bool:
    return any(isinstance(leaf, Hole) for leaf in pytree.tree_leaves(value))


def _key(value: Any) -> Any:
    if isinstance(value, Hole):
        return "hole", type(value), value.index, value.is_size
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if type(value) in (list, tuple):
        return type(value), tuple(_key(item) for item in value)
    return "object", id(value)


def full_name(function: type) -> str:
    """Give the name that files and options know a Function by."""
    return f"{function.__module__}.{function.__qualname__}"
