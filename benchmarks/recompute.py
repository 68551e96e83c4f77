"""What a memory budget costs in time and saves in memory, beside PyTorch's own checkpoint.

    python benchmarks/recompute.py
    python benchmarks/recompute.py --fractions 0.7 0.5 0.3 --levels 1 --rounds 20

Trains `deep_recompute` of models.py with eager PyTorch and with the engine, both also with
`torch.utils.checkpoint` around each block, and with the engine under budgets and by layers
(`memory_opt_level`). All stand in one process and take turns
of a forward and backward each, so that a slow minute falls on all; ratios are within a round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from memory import HighWater, tensor_bytes
from models import Workload, build
from rich.console import Console
from rich.table import Table
from torch.utils.checkpoint import checkpoint

import torch_ort

MEMORY_STEPS = 3
MIB = 1 << 20


@dataclass
class Side:
    """One way to train the model."""

    name: str
    workload: Workload
    call: Callable[..., torch.Tensor]
    options: dict | None = None  # of the engine, if it is that
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float = 0.0

    def step(self) -> None:
        """Run forward and backward once."""
        self.workload.model.zero_grad()
        loss = self.call(*self.workload.batches[0])
        loss.backward()
        self.loss = loss.item()

    def measure_peak(self) -> None:
        """Measure the peak of steps above what stands before them, without gradients."""
        self.step()
        self.workload.model.zero_grad()
        torch_ort.empty_cache()
        water = HighWater("cpu")
        water.start()
        for _ in range(MEMORY_STEPS):
            self.step()
        parameters = [p.grad for p in self.workload.model.parameters() if p.grad is not None]
        self.peak_bytes = water.peak_bytes() - tensor_bytes(parameters)

    def take_turn(self) -> None:
        """Time one step after one that is not timed."""
        self.step()
        begin = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - begin)


def checkpointed() -> Workload:
    """Make the model with a checkpoint around each block."""
    workload = build("deep_recompute", "cpu")
    for block in workload.model.blocks:
        forward = block.forward
        block.forward = lambda hidden, forward=forward: checkpoint(
            forward, hidden, use_reentrant=False
        )
    return workload


def in_engine(name: str, workload: Workload, **options: float) -> Side:
    """Take a model into the engine."""
    call = torch.compile(workload.model, backend="ort", options=options)
    return Side(name, workload, call, options)


def sides(fractions: list[float], levels: list[int]) -> list[Side]:
    """List all of them; the engine without a budget is the third."""
    eager, kept = build("deep_recompute", "cpu"), checkpointed()
    return [
        Side("eager", eager, eager.model),
        Side("eager, checkpoint of each block", kept, kept.model),
        in_engine("ort", build("deep_recompute", "cpu")),
        in_engine("ort, checkpoint of each block", checkpointed()),
        *(
            in_engine(f"ort, budget {each:g}", build("deep_recompute", "cpu"), memory_budget=each)
            for each in fractions
        ),
        *(
            in_engine(f"ort, level {each}", build("deep_recompute", "cpu"), memory_opt_level=each)
            for each in levels
        ),
    ]


def row(side: Side, dense: Side) -> list[str]:
    """Give the figures of a side, beside those of the engine without a budget."""
    ratios = [a / b for a, b in zip(side.seconds, dense.seconds, strict=True)]
    cells = [
        side.name,
        f"{1000 * min(side.seconds):.1f}",
        f"{min(side.seconds) / min(dense.seconds):.3f}",
        f"{statistics.median(ratios):.3f}",
        f"{side.peak_bytes / MIB:.1f}",
    ]
    if side.options is None:
        return [*cells, "", "", ""]
    inputs = side.workload.batches[0]
    (graph,) = torch_ort.explain(side.workload.model, *inputs, options=side.options).graphs
    planned = "" if graph.recomputation is None else f"{graph.recomputation.planned.plan_ms:.1f}"
    plan = graph.plan
    return [
        *cells,
        f"{plan['saved_bytes'] / MIB:.1f}",
        f"{(plan['context_bytes'] + plan['scratch_bytes']) / MIB:.1f}",
        planned,
    ]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.75, 0.5, 0.3])
    parser.add_argument("--levels", type=int, nargs="*", default=[1])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    all_sides = sides(given.fractions, given.levels)
    for side in all_sides:
        torch.manual_seed(1)
        side.measure_peak()
    for turn in range(given.rounds):
        shift = turn % len(all_sides)
        for side in all_sides[shift:] + all_sides[:shift]:
            side.take_turn()
    table = Table(
        "forward and backward", "min ms", "/ ort, min", "/ ort, median", "peak MiB",
        "held MiB", "planned peak MiB", "plan ms",
        title=f"deep_recompute, {given.threads} thread(s)",
    )  # fmt: skip
    for side in all_sides:
        table.add_row(*row(side, all_sides[2]))
    console = Console()
    console.print(table)
    console.print(
        f"fallbacks {torch_ort.counters()['fallbacks']}. peak: high-water mark of the process "
        "above what stood before the steps, without the parameters' gradients; planned peak: of "
        "the engine's memory, in which gradients take over dead activations"
    )


if __name__ == "__main__":
    main()
