"""Products of matrices: the engine's kernel beside PyTorch's, against the peak of the machine.

    python benchmarks/products.py                        # float32, all forms of the listed shapes
    python benchmarks/products.py --models bert llama    # and what training steps of these multiply
    python benchmarks/products.py --dtype bfloat16 --threads 1 --isa avx2
    python benchmarks/products.py --onednn libdnnl.so.2  # float32, beside oneDNN's dnnl_sgemm
    python benchmarks/products.py --cold                 # with factors that are in no cache

All write the same result from the same factors, in one process, in turns. The forms are those of a
linear layer: NT is its forward product, NN the gradient of its input, TN that of its weight.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import models
import torch
from onednn import OneDnn
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ort import _C
from torch_ort.reports.products import FIRST_FACTOR

FORMS = ("NT", "NN", "TN")
# m, k, n of a result of m rows and n columns, summed over k.
SHAPES = (
    (2048, 2048, 2048), (1024, 256, 8000), (1024, 256, 1024), (768, 256, 16000), (512, 768, 3072),
    (64, 512, 1024), (128, 64, 256), (32, 64, 64), (64, 512, 10), (16, 1024, 1024),
)  # fmt: skip
# Operations of products that are judged together: large ones by their part of the peak, small ones
# by PyTorch's speed.
LARGE, SMALL = 100e6, 4e6
COLD_BYTES = 128 << 20  # more than caches have
TURN_SECONDS = 2e-3  # of the repetitions of one side, so that a clock is exact


@dataclass(frozen=True)
class Row:
    """Seconds of one product, of each turn, and the machine's best."""

    batch: int
    m: int
    k: int
    n: int
    form: str
    ours: list[float]
    pytorch: list[float]
    onednn: list[float]  # empty: not asked for
    is_preferred: bool
    peak: float  # operations a second; the fastest that was measured beside any product

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.k * self.n

    def of_peak(self, seconds: list[float]) -> float:
        """Part of the peak that the fastest turn came to."""
        return self.flops / min(seconds) / self.peak

    @property
    def speed(self) -> float:
        """How many times PyTorch's speed, by the fastest turns."""
        return min(self.pytorch) / min(self.ours)

    @property
    def against_best(self) -> float:
        """The same of whichever library is faster."""
        return min(self.pytorch + self.onednn) / min(self.ours)


class Recorder(TorchDispatchMode):
    """Notes batch, sizes and form of each product that PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int, int, int, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = FIRST_FACTOR.get(func.overloadpacket.__name__)
        if first is not None:
            a, b = args[first : first + 2]
            form = "".join("T" if x.stride(-1) != 1 and x.stride(-2) == 1 else "N" for x in (a, b))
            batch = a.shape[0] if a.ndim == 3 else 1
            self.seen.add((batch, a.shape[-2], a.shape[-1], b.shape[-1], form))
        return func(*args, **(kwargs or {}))


def products_of(names: Iterable[str]) -> list[tuple[int, int, int, int, str]]:
    """List the products of a training step of some benchmark models, in eager PyTorch."""
    recorder = Recorder()
    for name in names:
        workload = models.build(name, "cpu")
        with recorder:
            workload.model(*workload.batches[0]).backward()
    return sorted(recorder.seen, key=lambda each: -math.prod(each[:4]))


def matrix(batch: int, rows: int, columns: int, form: str, dtype: torch.dtype) -> torch.Tensor:
    sizes = (columns, rows) if form == "T" else (rows, columns)
    numbers = torch.randn(batch, *sizes).to(dtype)
    numbers = numbers.transpose(1, 2) if form == "T" else numbers
    return numbers if batch > 1 else numbers[0]


def measure(
    shape: tuple[int, int, int, int], form: str, dtype: torch.dtype, isa: str, turns: int,
    onednn: OneDnn | None = None, least_bytes: int = 0,
) -> Row:  # fmt: skip
    """Measure a product of as many factors, one after the other, as have `least_bytes` together."""
    batch, m, k, n = shape
    multiply = torch.bmm if batch > 1 else torch.mm
    num_bytes = batch * (m * k + k * n + m * n) * dtype.itemsize
    calls: list[list[Callable[[], Any]]] = [[], [], []]
    kept = []  # calls know the addresses of their operands alone
    for _ in range(max(1, math.ceil(least_bytes / num_bytes))):
        a, b = matrix(batch, m, k, form[0], dtype), matrix(batch, k, n, form[1], dtype)
        ours, *results = (torch.empty((*a.shape[:-1], n), dtype=dtype) for _ in range(3))
        kept.append((a, b, ours, results))
        product = _C.Product(ours, a, b, isa=isa)
        calls[0].append(product.run)
        calls[1].append(functools.partial(multiply, a, b, out=results[0]))
        if onednn is not None and batch == 1:
            calls[2].append(onednn.product(results[1], a, b))
        product.run()
        for side, result in zip(calls[1:], results, strict=True):
            if side:
                side[-1]()
                torch.testing.assert_close(
                    ours.double(), result.double(), rtol=0.02, atol=0.02 * math.sqrt(k)
                )
    sides: list[tuple[list[Callable[[], Any]], list[float]]] = [
        (each, []) for each in calls if each
    ]
    repetitions = []
    for runs, _ in sides:
        start = time.perf_counter()
        for run in runs:
            run()
        once = max(time.perf_counter() - start, 1e-7)
        repetitions.append(max(1, int(TURN_SECONDS / once)))
    peak = _C.measure_peak(str(dtype).removeprefix("torch."), isa)
    for turn in range(turns):
        for i, (runs, seconds) in list(enumerate(sides))[:: 1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            for _ in range(repetitions[i]):
                for run in runs:
                    run()
            seconds.append((time.perf_counter() - start) / repetitions[i] / len(runs))
    taken = [seconds for _, seconds in sides]
    of_onednn = taken[2] if len(taken) == 3 else []
    return Row(*shape, form, taken[0], taken[1], of_onednn, product.is_preferred, peak)


def table(rows: list[Row], title: str) -> Table:
    result = Table(title=title)
    for head in ("product", "form", "MFLOP", "runs in", "us", "of peak", "PyTorch", "oneDNN",
                 "times", "median"):  # fmt: skip
        result.add_column(head, justify="left" if head in ("product", "form") else "right")
    for row in rows:
        sizes = f"{row.m}×{row.k}×{row.n}"
        result.add_row(
            sizes if row.batch == 1 else f"{row.batch} of {sizes}", row.form,
            f"{row.flops / 1e6:.2f}", "engine" if row.is_preferred else "PyTorch",
            f"{min(row.ours) * 1e6:.1f}", f"{row.of_peak(row.ours):.2f}",
            f"{row.of_peak(row.pytorch):.2f}",
            f"{row.of_peak(row.onednn):.2f}" if row.onednn else "", f"{row.speed:.2f}",
            f"{median(row.pytorch) / median(row.ours):.2f}",
        )  # fmt: skip
    return result


def means(rows: list[Row]) -> list[str]:
    """Say what the targets ask of the products of each size."""
    lines = []
    groups = (
        ("100 MFLOP and more", [row for row in rows if row.flops >= LARGE]),
        ("4 to 100 MFLOP", [row for row in rows if SMALL <= row.flops < LARGE]),
        ("below", [row for row in rows if row.flops < SMALL]),
    )
    for name, group in groups:
        if group:
            peak = geometric_mean(row.of_peak(row.ours) for row in group)
            speed = geometric_mean(row.speed for row in group)
            least = min(row.against_best for row in group)
            lines.append(
                f"{name}: {peak:.2f} of the peak, {speed:.2f} times PyTorch's speed, "
                f"{least:.2f} times the best library's at least ({len(group)} products)"
            )
    return lines


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32",
                        choices=["float32", "float64", "bfloat16", "float16"])  # fmt: skip
    parser.add_argument("--isa", default="", choices=["", *_C.isa_names()],
                        help="instruction set (default: the widest)")  # fmt: skip
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="*", default=[], choices=sorted(models.MODELS),
                        help="whose products are measured too")  # fmt: skip
    parser.add_argument("--turns", type=int, default=20, help="of each side, and each product")
    parser.add_argument("--onednn", metavar="LIBRARY", help="libdnnl.so.2, for float32")
    parser.add_argument("--cold", action="store_true",
                        help="factors and results that are in no cache")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    console = Console(width=110)
    torch.manual_seed(0)
    wanted = [(1, *shape, form) for shape in SHAPES for form in FORMS]
    wanted += [each for each in products_of(options.models) if each not in wanted]
    dtype, measured = getattr(torch, options.dtype), {}
    onednn = OneDnn(options.onednn) if options.onednn and options.dtype == "float32" else None
    least_bytes = COLD_BYTES if options.cold else 0
    for threads in options.threads:
        torch.set_num_threads(threads)
        rows = [
            measure(shape, form, dtype, options.isa, options.turns, onednn, least_bytes)
            for *shape, form in wanted
        ]
        # What else runs on the processor slows each of these measurements too.
        peak = max(row.peak for row in rows)
        rows = [replace(row, peak=peak) for row in rows]
        isa = options.isa or _C.isa_names()[-1]
        title = f"{options.dtype}, {isa}, threads: {threads}; peak {peak / 1e9:.0f} GFLOP/s"
        title += "; cold" if options.cold else ""
        console.print(table(rows, title))
        for line in means(rows):
            console.print(line, highlight=False)
        measured[threads] = [asdict(row) for row in rows]
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, "rows": measured}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
