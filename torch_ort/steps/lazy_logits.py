"""Logits that a graph returns beside the loss, computed only when they are read.

The caller gets a tensor of their sizes, dtype and history without their numbers. Who asks for these
gets a plain tensor instead, which is made once, by eager PyTorch, of the rows that went into the
layer and of its weight and bias.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from torch_ort import _C
from torch_ort._C import UserError
from torch_ort.pytorch.autograd_compat import version
from torch_ort.pytorch.dispatch_compat import (
    outside_inference_mode,
    plain_functions,
    without_numbers,
)
from torch_ort.pytorch.module_compat import pytree


class Recipe:
    """How one output of a graph is made; `inputs` are the positions of the graph's inputs.

    These are positions among what `logits` is given. See csrc/passes/lazy_logits.h.
    """

    def __init__(self, lazy: _C.LazyLogits, inputs: Sequence[int]) -> None:
        self.output = lazy.output
        self.classes = lazy.classes
        self.dtypes = [getattr(torch, name) for name in lazy.dtypes]
        self._weight = inputs[lazy.weight]
        self._bias = None if lazy.bias < 0 else inputs[lazy.bias]
        self._is_turned = lazy.is_turned
        self._soft_cap = lazy.soft_cap

    def form(self, rows: torch.Tensor) -> torch.Tensor:
        """Give a tensor of the sizes and dtype of the logits, which has one number in memory."""
        sizes = (*rows.shape[:-1], self.classes)
        return rows.new_empty((), dtype=self.dtypes[-1]).expand(sizes)

    def logits(self, form: torch.Tensor, rows: torch.Tensor, inputs: Sequence[Any]) -> torch.Tensor:
        """Give the logits of a call, with the sizes, dtype and history of `form`."""
        saved = [_Saved("the rows that go into it", rows, version(rows))]
        saved.append(_saved("its weight", inputs[self._weight]))
        if self._bias is not None:
            saved.append(_saved("its bias", inputs[self._bias]))
        return _lazy(form, form.dtype, lambda: self._make(*(each.read() for each in saved)))

    def _make(self, rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        """Make the logits."""
        weight = (weight.t() if self._is_turned else weight).to(rows.dtype)
        made = F.linear(rows, weight, None if bias is None else bias.to(rows.dtype))
        if self._soft_cap:
            made = torch.tanh(made.to(self.dtypes[0]) / self._soft_cap) * self._soft_cap
        for dtype in self.dtypes:
            made = made.to(dtype)
        return made


class _Saved(NamedTuple):
    """A tensor that logits are made of, and its version at the end of the call."""

    name: str
    tensor: torch.Tensor
    version: int

    def read(self) -> torch.Tensor:
        """Give the tensor; raises UserError if it was modified since the call."""
        now = version(self.tensor)
        if now != self.version:
            what = f"was written into (version {now}, want {self.version})"
        elif self.tensor.numel() > 0 and self.tensor.untyped_storage().nbytes() == 0:
            what = "was freed"
        else:
            return self.tensor
        raise UserError(
            f"lazy_logits: logits are made when they are first read, and of the layer that makes "
            f"them {self.name} {what} since; read them before (logits.detach() does), or leave "
            "the option lazy_logits off"
        )


def _saved(name: str, tensor: torch.Tensor) -> _Saved:
    # A tensor of its own, so that it is noticed if a parameter gets another tensor by `.data`.
    return _Saved(name, tensor.detach(), version(tensor))


class LazyLogits(torch.Tensor):
    """Logits that are computed at first read; later calls use the computed tensor."""

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, dtype: torch.dtype, make: Callable[[], torch.Tensor]
    ) -> LazyLogits:
        """Make it with the sizes of another tensor; `make` gives the numbers."""
        new = without_numbers(cls, like, dtype)
        new._make = make
        new._made = None
        new._lock = threading.Lock()
        return new

    def made(self) -> torch.Tensor:
        """Give the logits as a plain tensor with the same history.

        Raises UserError where what they are made of has been written into.
        """
        with self._lock:
            if self._made is None:
                self._made = self._with_history()
                self._make = None
        return self._made

    def _with_history(self) -> torch.Tensor:
        with plain_functions(), outside_inference_mode():
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                numbers = self._make()
            if not self.requires_grad:
                return numbers
            with torch.enable_grad():
                return _Made.apply(self, [numbers])

    def _is_short(self) -> bool:
        return self._made is None and self.dtype in (torch.bfloat16, torch.float16)

    def _as_float(self) -> LazyLogits:
        """Give them in float32, not made yet: who trains in a short float asks for all outputs."""
        with plain_functions():
            return _lazy(self, torch.float32, lambda: self.made().detach().float())

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a function on the computed logits; one that only reads the form computes nothing."""
        if func in _OF_FORM and isinstance(args[0], LazyLogits) and args[0]._made is None:
            with plain_functions():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float and not kwargs and args[0]._is_short():
            return args[0]._as_float()
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call an operator for C++, below autograd, which knows the history of this tensor."""
        args, kwargs = pytree.tree_map_only(
            LazyLogits, lambda lazy: lazy.made().detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _lazy(
    source: torch.Tensor, dtype: torch.dtype, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Give logits in the form of another tensor, and with its history."""
    if source.requires_grad and torch.is_grad_enabled():
        return _FromForm.apply(source, dtype, make)
    return LazyLogits(source, dtype, make)


class _FromForm(torch.autograd.Function):
    """From a tensor that has a history to logits, which may be of another dtype."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, dtype: torch.dtype, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        ctx.dtype = source.dtype
        return LazyLogits(source, dtype, make)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.dtype), None, None


class _Made(torch.autograd.Function):
    """From logits without data to those that have been made."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, numbers: list[torch.Tensor]) -> torch.Tensor:
        return numbers.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _getters(*names: str) -> list[Callable]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


# Functions that do not read the numbers.
_OF_FORM = frozenset(
    [
        *_getters(
            "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested",
            "is_quantized", "is_sparse", "itemsize", "layout", "nbytes", "ndim",
            "output_nr", "requires_grad", "shape",
        ),
        torch.Tensor.__hash__, torch.Tensor.__len__, torch.Tensor.dim, torch.Tensor.element_size,
        torch.Tensor.get_device, torch.Tensor.is_complex, torch.Tensor.is_floating_point,
        torch.Tensor.is_inference, torch.Tensor.ndimension, torch.Tensor.nelement,
        torch.Tensor.numel, torch.Tensor.register_hook, torch.Tensor.size, torch.is_complex,
        torch.is_floating_point, torch.numel,
    ]
)  # fmt: skip
