"""What random programs call by name: autograd functions, modules with hooks, objects of arguments.

Scripts of programs that fail hold this file's text after their imports.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch


class WithPlace(torch.autograd.Function):
    """Gives a value with a gradient, and where it is largest, which has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute both."""
        place = x.flatten().argmax().reshape(1)
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(place)
        return x.sin(), place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        """Give the gradient of the first."""
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class BetweenConstants(torch.autograd.Function):
    """Gives three values, of which the outer ones have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute all."""
        low, high = x.detach() - 1, x.detach() + 1
        ctx.mark_non_differentiable(low, high)
        return low, x * 2, high

    @staticmethod
    def backward(ctx: Any, _: Any, gradient: torch.Tensor, __: Any) -> torch.Tensor:
        """Give the gradient of the one in the middle."""
        return gradient * 2


class OneSided(torch.autograd.Function):
    """A product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Give the first factor's gradient."""
        (y,) = ctx.saved_tensors
        return gradient * y, None


class Unfilled(torch.autograd.Function):
    """Gives two values; the gradient of what nobody reads is None, not zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute both."""
        ctx.set_materialize_grads(False)
        return x * 3, x + 1

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> torch.Tensor | None:
        """Add what has come."""
        first = None if first is None else first * 3
        if first is None or second is None:
            return second if first is None else first
        return first + second


def half_of_result(module: torch.nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    """Halve what a module gives."""
    return result * 0.5


def one_more(module: torch.nn.Module, args: Any) -> tuple:
    """Add to the argument of a module."""
    return (args[0] + 1,)


def doubled_gradient(module: torch.nn.Module, given: Any, came: Any) -> tuple:
    """Double the gradients that leave a module's backward."""
    return tuple(None if one is None else one * 2 for one in given)


def add_parts(module: torch.nn.Module, with_backward: bool) -> None:
    """Give a module numbers in attributes, and parts that have hooks, of backward if asked for."""
    module.hot, module.step = 0.75, 2
    module.halved = torch.nn.Tanh()
    module.halved.register_forward_hook(half_of_result)
    module.moved = torch.nn.Sigmoid()
    module.moved.register_forward_pre_hook(one_more)
    if with_backward:
        module.doubled = torch.nn.Softplus()
        module.doubled.register_full_backward_hook(doubled_gradient)


@dataclasses.dataclass
class Batch:
    """Tensors of one call."""

    x0: Any = None
    x1: Any = None
    x2: Any = None
    x3: Any = None


class Sample:
    """Tensors of one call, beside what is no tensor."""

    def __init__(self, **tensors: Any) -> None:
        self.name, self.scale = "sample", 1.0
        self.__dict__.update(tensors)


OBJECTS = {
    "dataclass": Batch, "namespace": types.SimpleNamespace, "class": Sample, "dict": dict
}  # fmt: skip


def packed(kind: str, tensors: list[torch.Tensor]) -> list[Any]:
    """Give the arguments of a call: tensors, or one object that holds them."""
    if not kind:
        return tensors
    return [OBJECTS[kind](**{f"x{i}": tensor for i, tensor in enumerate(tensors)})]
