"""What a machine can do at most, as measured: operations of products, bytes of copies.

On the CPU by loops in C++ that do nothing else (`csrc/cpu/peak.h`), on all threads of PyTorch's. On
other devices by a large product, and by a large copy, of PyTorch's own. There numbers are random:
of equal ones a product switches fewer bits, takes less power, and is faster than any of training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torch_ort import _C

DTYPES = ("float32", "float64", "bfloat16", "float16")  # dtypes for which products have a peak

_MIN_REPETITIONS = 3
_SECONDS = 0.05
_BATCHES = 3  # of repetitions between two events
# Of the matrices of a large product; many GPUs have few units for float64.
_SIDES = {"float32": 8192, "float64": 4096, "bfloat16": 8192, "float16": 8192}
_SMALLEST_SIDE = 256
# Of a smaller copy, the caches of a GPU keep a good part from one repetition to the next.
_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Peaks:
    """How fast products can be."""

    flops: dict[str, float]  # operations a second, by dtype
    where: str  # what was measured: an instruction set and threads, or a device

    def __str__(self) -> str:
        rates = [f"{rate / 1e9:.1f} GFLOP/s of {dtype}" for dtype, rate in self.flops.items()]
        return f"{' and '.join(rates)} ({self.where})"


def product_peaks(dtypes: Iterable[str], device: torch.device, isa: str) -> Peaks:
    """Measure the peaks of some of DTYPES, of an instruction set if one is named."""
    if device.type != "cpu":
        return Peaks({dtype: _large_product(dtype, device) for dtype in dtypes}, str(device))
    threads = torch.get_num_threads()
    where = f"{isa or _C.isa_names()[-1]}, {threads} thread{'s' if threads > 1 else ''}"
    return Peaks({dtype: _C.measure_peak(dtype, isa) for dtype in dtypes}, where)


def copy_speed(num_bytes: int, device: torch.device) -> float:
    """Measure the bytes a second that copies read and write.

    On the CPU what they copy is as large as `num_bytes`: what fits into the caches is moved there.
    On other devices it is larger than their caches, as far as there is memory for it.
    """
    if device.type == "cpu":
        return _C.measure_copy(num_bytes)
    size = max(min(_COPIED_BYTES, _free_bytes(device) // 4), 1)
    source = torch.randint(
        256, (size,), dtype=torch.uint8, device=device, generator=_generator(device)
    )
    target = torch.empty_like(source)
    return 2 * size / _seconds_on_device(lambda: target.copy_(source), device)


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


def _large_product(dtype: str, device: torch.device) -> float:
    kind, side, free = getattr(torch, dtype), _SIDES[dtype], _free_bytes(device)
    while side > _SMALLEST_SIDE and 3 * side**2 * kind.itemsize > free // 2:
        side //= 2
    generator = _generator(device)
    one, two = (
        torch.randn(side, side, dtype=kind, device=device, generator=generator) for _ in range(2)
    )
    result = torch.empty_like(one)
    # Under the caller's autocast, products of float32 would be those of a shorter dtype.
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        seconds = _seconds_on_device(lambda: torch.mm(one, two, out=result), device)
    return 2 * side**3 / seconds


def _generator(device: torch.device) -> torch.Generator:
    """Make a generator, so that the one of the device stays as it is."""
    return torch.Generator(device=device).manual_seed(0)


def _free_bytes(device: torch.device) -> int:
    """Give the memory that nobody has, and what PyTorch's allocator keeps without need."""
    if device.type != "cuda":
        return sys.maxsize
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _seconds_on_device(run: Callable[[], Any], device: torch.device) -> float:
    """Give the seconds that a run takes on its device, many of them one after the other.

    The host's clock would count the launch and the wait as well, which take as long as a small run.
    """
    if device.type != "cuda":
        return best_seconds(run, device, _SECONDS)
    with torch.cuda.device(device):
        run()  # the first one also opens libraries and chooses kernels
        once = _between_events(run, 1)
        repetitions = math.ceil(_SECONDS / max(once, 1e-5))
        return min(_between_events(run, repetitions) for _ in range(_BATCHES))


def _between_events(run: Callable[[], Any], repetitions: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repetitions


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
