"""The arguments of a Function's call, divided into tensors, sizes and constants of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ort.pytorch.module_compat import pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Hole:
    """A place in the arguments that a tensor or a size of each call fills."""

    def __init__(self, index: int, is_size: bool) -> None:
        self.index = index
        self.is_size = is_size


class Arguments:
    """A call's arguments. `tensors` are those that autograd sees, then those inside of containers.

    `values` has one entry for each argument: a Hole, a constant, or a container of both.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.tensors: list[torch.Tensor] = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.num_seen = len(self.tensors)  # the number of tensors that autograd sees
        self.sizes: list[torch.SymInt] = []
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
            return float(value)
        if isinstance(value, list | tuple | dict):
            leaves, spec = pytree.tree_flatten(value)
            if any(isinstance(leaf, torch.Tensor | torch.SymInt) for leaf in leaves):
                return pytree.tree_unflatten([self._take(leaf) for leaf in leaves], spec)
        return value

    def key(self) -> tuple:
        """Give a value that is equal for arguments of equal constants and equal form."""
        return tuple(_key(value) for value in self.values)

    def filler(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Give a callable of tensors and sizes that calls `call` with all arguments."""
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


def _has_hole(value: Any) -> bool:
    return any(isinstance(leaf, Hole) for leaf in pytree.tree_leaves(value))


def _key(value: Any) -> Any:
    if isinstance(value, Hole):
        return "hole", value.index, value.is_size
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if type(value) in (list, tuple):
        return type(value), tuple(_key(item) for item in value)
    return "object", id(value)


def full_name(function: type) -> str:
    """Give the name that files and options know a Function by."""
    return f"{function.__module__}.{function.__qualname__}"
