"""What a machine can do at most, as measured: operations of products, bytes of copies.

On the CPU by loops in C++ that do nothing else (`csrc/cpu/peak.h`), on all threads of PyTorch's. On
other devices by a large product, and by a large copy, of PyTorch's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torch_ort import _C

DTYPES = ("float32", "float64", "bfloat16", "float16")  # dtypes for which products have a peak

_MIN_REPETITIONS = 3
_SECONDS = 0.05
_SIDE = 4096  # of the matrices of a large product
_COPIED_BYTES = 64 << 20  # larger than caches


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
    """
    if device.type == "cpu":
        return _C.measure_copy(num_bytes)
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / best_seconds(lambda: target.copy_(source), device, _SECONDS)


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
    matrix = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, dtype), device=device)
    return 2 * _SIDE**3 / best_seconds(lambda: matrix @ matrix, device, _SECONDS)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
