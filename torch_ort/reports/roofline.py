"""The least time that a training step can take on this machine.

That is its matrix products, convolutions and attention, each as fast as PyTorch's own kernel has
been for its shapes, and all memory that a step cannot avoid, touched once at the speed of a copy:
inputs, parameters, gradients, and what backward needs of forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from torch_ort.pytorch.module_compat import pytree
from torch_ort.pytorch.trace_compat import TorchDispatchMode

_MIN_REPETITIONS = 3
_SECONDS_PER_SHAPE = 0.05
_COPIED_BYTES = 64 << 20  # larger than caches


@dataclass(frozen=True)
class Roofline:
    """What a step needs at least, and what it took."""

    flops: int  # of products; attention of the CPU counts none
    product_seconds: float
    memory_bytes: int
    bytes_per_second: float
    step_seconds: float  # as measured

    @property
    def memory_seconds(self) -> float:
        """Seconds that the unavoidable memory takes at the speed of a copy."""
        return self.memory_bytes / self.bytes_per_second

    @property
    def seconds(self) -> float:
        """The least time of a step."""
        return self.product_seconds + self.memory_seconds

    @property
    def ratio(self) -> float:
        """How many times the least time a step took."""
        return self.step_seconds / self.seconds


def measure(
    eager_step: Callable[[], None], memory_bytes: int, step_seconds: float, device: torch.device
) -> Roofline:
    """Run a step in eager PyTorch, its products several times, and give the roofline."""
    with _Products(device) as products:
        eager_step()
    speed = _copy_speed(device)
    return Roofline(products.flops, products.seconds, memory_bytes, speed, step_seconds)


def best_seconds(run: Callable[[], Any], device: torch.device, at_least: float) -> float:
    """Give the shortest of a few runs, three at least and for `at_least` seconds in all."""
    best, spent, runs = float("inf"), 0.0, 0
    while runs < _MIN_REPETITIONS or spent < at_least:
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        seconds = time.perf_counter() - begin
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_speed(device: torch.device) -> float:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / best_seconds(lambda: target.copy_(source), device, 0.2)


class _Products(TorchDispatchMode):
    """Times each product that runs, once for each set of shapes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.flops = 0
        self.seconds = 0.0
        self._device = device
        self._best: dict[Any, float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet not in flop_registry and "attention" not in packet.__name__:
            return result
        key = func, tuple(map(_form, pytree.tree_leaves((args, kwargs))))
        if key not in self._best:
            self._best[key] = best_seconds(
                lambda: func(*args, **kwargs), self._device, _SECONDS_PER_SHAPE
            )
        self.seconds += self._best[key]
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        return result


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return repr(value)
