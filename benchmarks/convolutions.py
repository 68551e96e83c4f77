"""How close the convolutions of training steps come to the peak of the machine, layer by layer.

    python benchmarks/convolutions.py                          # four models, all threads
    python benchmarks/convolutions.py --models resnet50 --threads 1 --json convolutions.json

These are the steps of the engine that are convolutions, gradients of one, or products, as those of
single pixels are; the fastest run of each counts. Operations are those of the definition, so that
Winograd's algorithm, which multiplies less, may come to more than the peak. Depthwise convolutions
are held against their operations or a copy that moves as many bytes, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean

import torch
from models import MODELS
from rich.console import Console
from rich.table import Table

import torch_ort
from torch_ort import _C
from torch_ort.reports.peaks import copy_speed
from torch_ort.reports.profile_rows import StepTimes

CONVOLUTIONAL = ("resnet18", "unet", "mobilenet", "convnext")
# Multiplications of a tile of 2x2 results by windows of 3x3: by definition, and by Winograd.
BY_DEFINITION, BY_WINOGRAD = 2 * 2 * 3 * 3, 4 * 4
PEAKS = 5


@dataclass(frozen=True)
class Layer:
    """One step: what it computes, its fastest run, and the least time that the machine needs."""

    model: str
    step: str
    op: str
    half: str
    sizes: str
    is_depthwise: bool
    microseconds: float
    least: float  # microseconds

    @property
    def of_limit(self) -> float:
        """Part of what the machine can do."""
        return self.least / self.microseconds


@cache
def bytes_a_second(num_bytes: int) -> float:
    return copy_speed(num_bytes, torch.device("cpu"))


def definition_flops(step: StepTimes) -> float:
    """Count operations by the definition; an odd side of a result counts as one more pixel."""
    is_winograd = step.op.startswith("torch_ort.Winograd")
    return step.flops * (BY_DEFINITION / BY_WINOGRAD if is_winograd else 1)


@cache
def operations_a_second(dtype: str) -> float:
    """Measure the peak; the best of several, for other programs may slow one down."""
    return max(_C.measure_peak(dtype, "") for _ in range(PEAKS))


def layers_of(model: str, steps: int) -> Iterator[Layer]:
    """Profile a training step, and give its layers."""
    torch.manual_seed(0)
    workload = MODELS[model]()
    for step in torch_ort.profile(workload.model, *workload.batches[0], steps=steps).ranked:
        if step.kind != "products" or not (step.flops and step.peak):
            continue
        least = definition_flops(step) / operations_a_second(step.dtype)
        # Both gradients of a convolution of one channel's result are two such products.
        is_depthwise = all(each.n == 1 and each.count > 2 for each in step.products)
        if is_depthwise:
            moved = step.read_bytes + step.written_bytes
            least = max(least, moved / bytes_a_second(moved))
        yield Layer(
            model, step.name, step.op, step.half, step.sizes, is_depthwise, step.min, least * 1e6
        )


def table_of(model: str, layers: Sequence[Layer]) -> Table:
    table = Table(title=f"{model}, {torch.get_num_threads()} threads")
    for head in ("step", "half", "op", "sizes"):
        table.add_column(head)
    for head in ("us", "least / us"):
        table.add_column(head, justify="right")
    for each in layers:
        table.add_row(
            each.step, each.half, each.op, each.sizes, f"{each.microseconds:.0f}",
            f"{each.of_limit:.2f}",
        )  # fmt: skip
    return table


def means_of(layers: Sequence[Layer]) -> str:
    dense = [each.of_limit for each in layers if not each.is_depthwise]
    depthwise = [each.of_limit for each in layers if each.is_depthwise]
    texts = []
    if dense:
        texts.append(f"{len(dense)} layers: {geometric_mean(dense):.2f} of the peak")
    if depthwise:
        mean = geometric_mean(depthwise)
        texts.append(f"{len(depthwise)} depthwise ones: {mean:.2f} of the limit")
    return f"{'; '.join(texts) or 'no layers'} (geometric means)"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=CONVOLUTIONAL)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=20, help="runs of each layer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure, and print a table for each model."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    found: list[Layer] = []
    for model in options.models:
        layers = list(layers_of(model, options.steps))
        console.print(table_of(model, layers))
        console.print(f"{model}: {means_of(layers)}")
        found += layers
    console.print(f"all: {means_of(found)}")
    if options.json is not None:
        rows = {"threads": options.threads, "layers": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
