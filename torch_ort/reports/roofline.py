"""The least time that a training step can take on this machine, and where products lose more.

The least is its products, convolutions and attention at the machine's peak, and all memory that a
step cannot avoid, touched once at the speed of a copy: inputs, parameters, gradients, and what
backward needs of forward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ort.engine.program import Program
from torch_ort.pytorch.trace_compat import TorchDispatchMode
from torch_ort.reports.peaks import DTYPES, Peaks, best_seconds, copy_speed, product_peaks
from torch_ort.reports.products import product
from torch_ort.reports.profile_reader import time_steps
from torch_ort.reports.profile_rows import StepTimes
from torch_ort.reports.runs import device_of, kept, run_backward, tensors_of
from torch_ort.reports.tables import Cell, bytes_text, columns, time_text

PROFILED_STEPS = 5
ROWS_IN_TEXT = 10


@dataclass(frozen=True)
class Roofline:
    """What a step needs at least, and what it took."""

    flops: dict[str, int]  # of the program's products, by dtype
    peaks: Peaks  # of these dtypes
    memory_bytes: int
    bytes_per_second: float
    step_seconds: float  # as measured
    # Those of the engine for which there is a peak; the one that loses most comes first.
    products: list[StepTimes]

    @property
    def product_seconds(self) -> float:
        """Seconds that the products take at the peak of their dtypes."""
        return sum(flops / self.peaks.flops[dtype] for dtype, flops in self.flops.items())

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
        return self.step_seconds / self.seconds if self.seconds else math.inf

    def __str__(self) -> str:
        lines = [
            f"roofline: a step took {time_text(1e6 * self.step_seconds)}, {self.ratio:.2f} of the "
            f"least: {time_text(1e6 * self.product_seconds)} for products "
            f"({sum(self.flops.values()) / 1e9:.2f} GFLOP) and "
            f"{time_text(1e6 * self.memory_seconds)} for {bytes_text(self.memory_bytes)} at "
            f"{self.bytes_per_second / 1e9:.1f} GB/s"
        ]
        if self.flops:
            lines.append(f"  peak of products: {self.peaks}")
        if self.products:
            rows = [_row(step) for step in self.products[:ROWS_IN_TEXT]]
            heads = ("step", "op", "product", "time", "GFLOP/s", "of peak", "lost", "origin")
            lines.append("  products that lose most against it:")
            lines += [f"    {line}" for line in columns((heads, rows))]
        return "\n".join(lines)


def _row(step: StepTimes) -> tuple[Cell, ...]:
    return (
        step.name, step.op, step.sizes, (step.per_run, time_text(step.per_run)),
        (step.rate[0], f"{step.rate[0]:.1f}"), (step.of_peak or 0.0, f"{step.of_peak:.1%}"),
        (step.lost, time_text(step.lost)), step.origin,
    )  # fmt: skip


def measure(
    model: Any, compiled: Any, given: tuple[Any, Any], programs: list[Program], isa: str
) -> Roofline:
    """Time steps of a compiled model, and measure what the machine can do.

    `given`: arguments and keyword arguments. The model, its inputs and random generators come out
    as they went in.
    """
    inputs, kwargs = given
    device = device_of(model, given)

    def step(function: Any) -> None:
        run_backward(model, function(*inputs, **kwargs), given)

    with kept(model, given):
        step(compiled)  # the first run may do more than later ones
        seconds = best_seconds(lambda: step(compiled), device, at_least=1.0)
        # On other devices the time of a step is only that of its launch.
        profile = None
        if device.type == "cpu":
            profile = time_steps(lambda: step(compiled), PROFILED_STEPS, programs, [])
        flops = count_flops(lambda: step(model))
    products = profile.product_dtypes if profile else ()
    asked = [dtype for dtype in DTYPES if dtype in flops or dtype in products]
    peaks = product_peaks(asked, device, isa)
    judged = []
    if profile:
        profile.hold_against(peaks)
        judged = [each for each in profile.steps if each.of_peak is not None]
    num_bytes = _unavoidable_bytes(model, given, programs)
    speed = copy_speed(max(num_bytes, 1), device)
    judged.sort(key=lambda each: -each.lost)
    return Roofline(flops, peaks, num_bytes, speed, seconds, judged)


def _unavoidable_bytes(model: Any, given: tuple[Any, Any], programs: list[Program]) -> int:
    """Give the bytes of inputs, parameters, gradients, and of what backward reads of forward."""
    parameters = list(getattr(model, "parameters", list)())
    gradients = [parameter for parameter in parameters if parameter.requires_grad]
    tensors = [*tensors_of(given), *parameters, *(gradients if torch.is_grad_enabled() else [])]
    plans = [program.session.plan_report() or {} for program in programs]
    crossing = sum(plan.get("saved_bytes", 0) for plan in plans)
    return crossing + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def count_flops(run: Callable[[], None]) -> dict[str, int]:
    """Run something in eager PyTorch and give the operations of its products, by DTYPES."""
    with _Products() as products:
        run()
    return dict(products.flops)


class _Products(TorchDispatchMode):
    """Counts the operations of products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        shapes = [arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args]
        found = product(func._overloadpacket.__name__, shapes)
        if found is not None:
            dtype = str(args[0].dtype).removeprefix("torch.")
            if dtype in DTYPES:
                self.flops[dtype] += found.flops
        return func(*args, **(kwargs or {}))
