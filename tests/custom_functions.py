# Functions of all kinds, each with a gradient that a derived one would not have.
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

log: list[str] = []


class Net(nn.Module):
    """Layers around a function of one tensor."""

    def __init__(self, function: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.function = function
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> Any:
        result = self.function(self.before(x))
        if isinstance(result, tuple):
            return tuple(
                part * self.scale
                if isinstance(part, torch.Tensor) and part.shape[-1:] == self.scale.shape
                else part
                for part in result
            )
        return result * self.scale if result.shape[-1:] == self.scale.shape else result


class Scaled(Function):
    """Multiplies by a constant; its gradient is ten times that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return 10 * ctx.factor * grad, None


class Squared(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Exp(Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


class NumpyTanh(Function):
    """Sees numbers, and no tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.y = np.tanh(x.detach().cpu().numpy())
        return torch.from_numpy(ctx.y).to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(grad.cpu().numpy() * (1 - ctx.y**2)).to(grad.device)


class MemoryNegated(Function):
    """Reads and writes memory by its address."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        device, x = x.device, x.contiguous().cpu()
        y = torch.empty_like(x)
        numbers = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        results = (ctypes.c_float * y.numel()).from_address(y.data_ptr())
        for i, number in enumerate(numbers):
            results[i] = -number
        return y.to(device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class CopyNegated(MemoryNegated):
    """Reads the memory of a tensor that it has made itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return MemoryNegated.forward(ctx, x.clone())


class Halves(Function):
    """Two results, of which the second is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        return x / 2, largest

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        return grad / 2


class FixedCopy(Function):
    """A floating point result that is marked as not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copy = x.clone()
        ctx.mark_non_differentiable(copy)
        return x * 3, copy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        return 3 * grad


class SumAndProduct(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(a, b)
        return a + b, a * b

    @staticmethod
    def backward(ctx: Any, of_sum: torch.Tensor, of_product: torch.Tensor) -> tuple:
        a, b = ctx.saved_tensors
        return of_sum + of_product * b, of_sum + of_product * a


class ThreeParts(Function):
    """Its gradient depends on which results had one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, materialize: bool, is_last_fixed: bool) -> tuple:
        ctx.set_materialize_grads(materialize)
        results = x * 2, x * 3, x * 4
        if is_last_fixed:
            ctx.mark_non_differentiable(results[-1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        came = [i * grad for i, grad in enumerate(grads, start=2) if grad is not None]
        return sum(came) * (1 + 10 * len(came)), None, None


class NoGradient(Function):
    """Gives no gradient, and says when it was asked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        log.append("asked")


class NoMaterialized(Function):
    """Is told None of results that nobody uses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x + 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> torch.Tensor:
        log.append(f"{first is None} {second is None}")
        total = 0
        total = total if first is None else total + 5 * first
        return total if second is None else total + 7 * second


class Materialized(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        log.append(f"{first is None} {second is None}")
        return 5 * first + 7 * second


class IgnoresSecond(Function):
    """Gives None as the gradient of a tensor that asks for one."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, None


class AddsOne(Function):
    """Writes into its argument, and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 4 * grad


class Identity(Function):
    """Gives its argument back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Split(Function):
    """Setup apart from forward."""

    @staticmethod
    def forward(x: torch.Tensor, power: int = 3) -> torch.Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1), None


class Outer(Function):
    """Calls other Functions, one of them under autograd of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = Squared.apply(ctx.x) + Scaled.apply(ctx.x, 2.0)
        return ctx.y.detach() + Exp.apply(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (inner,) = torch.autograd.grad(ctx.y, ctx.x, grad)
        return inner


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 9


class Stashing(Function):
    """Keeps tensors where autograd does not look: arguments, parts of them, its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = {"x": x, "rows": [x[:2]], "view": x.view(-1)}
        ctx.y = (x * 2).sin()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x = ctx.kept["x"]
        part = ctx.kept["rows"][0].sum() + ctx.kept["view"][0]
        return grad * (x + part) + ctx.y


class Straight(Function):
    """Rounds; its gradient is the one that comes in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Wanted(Function):
    """Computes only the gradients that are asked for."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b + c

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        a, b = ctx.saved_tensors
        log.append(f"{ctx.needs_input_grad}")
        return (
            grad * b if ctx.needs_input_grad[0] else None,
            grad * a if ctx.needs_input_grad[1] else None,
            grad if ctx.needs_input_grad[2] else None,
        )


class Mixed(Function):
    """Arguments and results that are no tensors."""

    @staticmethod
    def forward(ctx, x, flag, count, factor, sizes, name, options, nothing):
        assert (flag, name, options["power"], nothing) == (True, "name", 2, None)
        ctx.total = count + sum(sizes)
        return x * factor * ctx.total, None, "text"

    @staticmethod
    def backward(ctx, grad, *others):
        return (grad * ctx.total, *(None,) * 7)


class Nested(Function):
    """Takes tensors in containers, which autograd does not look into."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: list) -> torch.Tensor:
        return x + parts[0] * parts[1]["weight"]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return 2 * grad, None


class Logging(Function):
    """Does something besides: its order shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        log.append(f"forward {name}")
        ctx.name = name
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        log.append(f"backward {ctx.name}")
        return grad * 2, None


class Transposed(Function):
    """A result with unusual strides."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return (grad * 2).t()


class NumpyTransposed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().cpu().numpy() * 2).t().to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(grad.cpu().numpy() * 2).t().to(grad.device)


class NumpyBackward(Function):
    """Only backward needs numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (grad.cpu() * np.cos(x.detach().cpu().numpy())).to(grad.device)
