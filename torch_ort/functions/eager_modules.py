"""Modules and functions that stay in eager PyTorch in a captured graph: each call is a node.

They look at numbers or write into what autograd watches, which a graph cannot; what stands around
them is captured all the same. A call has an autograd graph of its own,
which lives as long as the node's context.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_ort._C import Unsupported
from torch_ort.functions.call import Calls
from torch_ort.functions.own_graph import gradients_through
from torch_ort.pytorch.module_compat import calls_replaced, is_norm, pytree
from torch_ort.pytorch.trace_compat import is_traced

_thread = threading.local()  # `copies`: of the modules, while their calls are learnt


class EagerCall(torch.autograd.Function):
    """A call of a module in eager PyTorch: its own tensors come after the arguments."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *values: torch.Tensor | float) -> torch.Tensor:
        """Run the module on the first values, which are tensors, sizes and numbers."""
        with torch.set_grad_enabled(call.has_gradients and any(ctx.needs_input_grad)):
            given = [
                value.detach().requires_grad_(value.requires_grad)
                if isinstance(value, torch.Tensor)
                else value
                for value in values[: call.num_arguments]
            ]
            has_numbers = not any(map(is_traced, values))
            result, own = call.run(given) if has_numbers else call.run_without_numbers(given)
        if not isinstance(result, torch.Tensor):
            raise Unsupported(f"{call.name}: gives a {type(result).__name__}, want a tensor")
        ctx.result, ctx.leaves = result, [*given, *own]
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run backward through the call's own graph; sparse gradients are accumulated here."""
        gradients = gradients_through([ctx.result], [gradient], ctx.leaves)
        for i, (leaf, each) in enumerate(zip(ctx.leaves, gradients, strict=True)):
            if each is not None and each.layout != torch.strided:
                leaf.grad = each if leaf.grad is None else leaf.grad + each
                gradients[i] = None
        return None, *gradients


# What differs from call to call among the arguments, besides what guards of the graph compare.
_DIFFERING = (torch.Tensor, torch.SymInt, torch.SymFloat)


class _Call:
    """One place at which a module, or a function of torch's, is called: its other arguments."""

    def __init__(self, called: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        is_module = isinstance(called, nn.Module)
        self.name = type(called).__name__ if is_module else called.__name__
        self.has_gradients = torch.is_grad_enabled()
        self._called = weakref.ref(called) if is_module else lambda: called
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._differs = [isinstance(leaf, _DIFFERING) for leaf in leaves]
        self._constants = [
            None if differs else leaf for leaf, differs in zip(leaves, self._differs, strict=True)
        ]
        self.given = [leaf for leaf in leaves if isinstance(leaf, _DIFFERING)]
        self.num_arguments = len(self.given)

    def run(self, given: list[Any]) -> tuple[Any, list[nn.Parameter]]:
        """Call it; give its result, and its parameters."""
        called = self._called()
        called = getattr(_thread, "copies", {}).get(id(called), called)
        args, kwargs = self._arguments(given)
        own = [*called.parameters()] if isinstance(called, nn.Module) else []
        return called(*args, **kwargs), own

    def run_without_numbers(self, given: list[Any]) -> tuple[Any, list[nn.Parameter]]:
        """Give a tensor of the form of the result. Raises Unsupported if only a run tells it."""
        form = _FORMS.get(self._called())
        if form is None:
            raise Unsupported(f"{self.name}: looks at numbers")
        args, kwargs = self._arguments(given)
        return form(*args, **kwargs), []

    def _arguments(self, given: list[Any]) -> tuple[tuple, dict]:
        values = iter(given)
        leaves = [
            next(values) if differs else constant
            for constant, differs in zip(self._constants, self._differs, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._spec)


@contextmanager
def eager_modules_whole(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Put calls of modules and functions that no graph can make into traces made in the block.

    Gives the parameters that these calls write into: nothing else in a graph may read them.
    """
    copies = {
        id(part): _copy(part) for part in module.modules() if part is not module and _stays(part)
    }
    calls = Calls()
    written = [
        parameter
        for part in module.modules()
        if id(part) in copies and getattr(part, "max_norm", None) is not None
        for parameter in part.parameters()
    ]
    before, _thread.copies = getattr(_thread, "copies", {}), copies

    def call(theirs: Callable[..., Any], part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if id(part) not in copies or not any(map(is_traced, leaves)):
            return theirs(part, *args, **kwargs)
        made = _Call(part, args, kwargs)
        return calls.put(EagerCall, (made, *made.given, *part.parameters()))

    try:
        with calls_replaced(call) if copies else nullcontext(), _Functions(calls):
            yield written
    finally:
        _thread.copies = before
        calls.forget()


class _Functions(TorchFunctionMode):
    """Puts calls of functions that look at numbers into the trace as nodes."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Call a function of torch's."""
        kwargs = kwargs or {}
        if func not in _FORMS or not any(map(is_traced, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        made = _Call(func, args, kwargs)
        return self._calls.put(EagerCall, (made, *made.given))


def _form_of_ctc(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any,
    blank: int = 0, reduction: str | int = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Give one number, or one for each sequence."""
    dense = log_probs.square()  # so that the gradient is dense, too
    return dense.sum((0, -1)) if reduction in ("none", 0) else dense.sum()


# Functions that look at numbers, and what has the form of their results.
_FORMS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.ctc_loss: _form_of_ctc, nn.functional.ctc_loss: _form_of_ctc,
}  # fmt: skip


def _copy(part: nn.Module) -> nn.Module:
    with torch.no_grad():
        return copy.deepcopy(part)


def _stays(part: nn.Module) -> bool:
    """Tell whether a module does what no graph can."""
    if isinstance(part, nn.Embedding | nn.EmbeddingBag):
        return part.max_norm is not None
    if is_norm(part):
        return part.momentum is None and part.track_running_stats and part.training
    quantization = sys.modules.get("torch.ao.quantization")
    if quantization is None:
        return False
    return isinstance(part, quantization.FakeQuantizeBase | quantization.ObserverBase)
