"""The engine's own cost per step: a chain of small additions against a C++ loop of them.

    python benchmarks/step_overhead.py

Both sides add tensors of 16 floats on one thread, in one process. The loop calls `at::add_out` on
tensors made beforehand; the engine runs a graph of chained Add nodes read from ONNX text. What the
engine takes longer, divided by the number of additions, is its own cost per step.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import onnx.parser
import targets
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

WARM_UP_RUNS = 20


@dataclass(frozen=True)
class Overhead:
    """Seconds of each run: the loop, the engine's chain, and the engine's graph of one Add."""

    num_adds: int
    loop_s: list[float]
    engine_s: list[float]
    single_s: list[float]
    counted: dict[str, int]

    def per_add_us(self, figure: str = "min") -> float:
        """Return what one step of the engine costs beyond one turn of the loop."""
        take = min if figure == "min" else median
        return (take(self.engine_s) - take(self.loop_s)) / self.num_adds * 1e6


def chain_text(num_adds: int, size: int) -> str:
    """Write a graph that adds `step` to `start` the given number of times, as ONNX text."""
    names = ["start", *(f"sum{index}" for index in range(1, num_adds)), "total"]
    lines = [f"   {after} = Add ({before}, step)" for before, after in pairwise(names)]
    header = [
        '<ir_version: 10, opset_import: ["" : 20]>',
        f"chain (float[{size}] start, float[{size}] step) => (float[{size}] total)",
    ]
    return "\n".join([*header, "{", *lines, "}"])


def expected_total(inputs: dict[str, Tensor], num_adds: int) -> Tensor:
    total = inputs["start"].clone()
    for _ in range(num_adds):
        total += inputs["step"]
    return total


def measure(num_adds: int, size: int, rounds: int, repeats: int) -> Overhead:
    """Time both sides in turn, some repeats each a round.

    Raises ValueError if the engine's sum differs from eager's in any bit, or if a step of the
    graph is missing: a rewrite that folds additions would make the comparison worthless.
    """
    import torch_ort
    from torch_ort import _C

    def session(count: int) -> "_C.Session":
        model = onnx.parser.parse_model(chain_text(count, size))
        return _C.Session.from_onnx(model.SerializeToString())

    def time_runs(running: "_C.Session", runs: int) -> list[float]:
        times = []
        for _ in range(runs):
            begin = time.perf_counter()
            running.run(inputs)
            times.append(time.perf_counter() - begin)
        return times

    inputs = {"start": torch.rand(size), "step": torch.rand(size)}
    chain, single = session(num_adds), session(1)
    total = chain.run(inputs)["total"]
    want = expected_total(inputs, num_adds)
    if not torch.equal(total, want):
        raise ValueError(f"chain: got a sum {total.tolist()}, want {want.tolist()}")

    loop_s: list[float] = []
    engine_s: list[float] = []
    single_s: list[float] = []
    _C.bench_add_loop(num_adds, size, WARM_UP_RUNS)
    time_runs(chain, WARM_UP_RUNS)
    time_runs(single, WARM_UP_RUNS)
    before = torch_ort.counters()
    for _ in range(rounds):
        loop_s += _C.bench_add_loop(num_adds, size, repeats)
        engine_s += time_runs(chain, repeats)
        single_s += time_runs(single, repeats)
    after = torch_ort.counters()
    counted = {key: value - before.get(key, 0) for key, value in after.items()}
    want_steps = rounds * repeats * (num_adds + 1)
    if counted.get("steps_run") != want_steps:
        raise ValueError(f"steps_run: got {counted.get('steps_run')}, want {want_steps}")
    return Overhead(num_adds, loop_s, engine_s, single_s, counted)


def print_report(console: Console, overhead: Overhead, size: int) -> None:
    """Print both sides, their difference per step, and whether the target is met."""
    count = overhead.num_adds
    table = Table(title=f"{count} additions of {size} floats, one thread, µs", title_justify="left")
    for column in ("", "min", "median", "min / addition", "median / addition"):
        table.add_column(column, justify="right" if column else "left")
    rows = [
        ("C++ loop of at::add_out", overhead.loop_s, count),
        ("engine, the chain", overhead.engine_s, count),
        ("engine, one Add (its cost per run)", overhead.single_s, 1),
    ]
    for name, times, additions in rows:
        low, mid = min(times) * 1e6, median(times) * 1e6
        table.add_row(name, *(f"{v:.3f}" for v in (low, mid, low / additions, mid / additions)))
    console.print(table)
    counted = ", ".join(f"{key} {value}" for key, value in overhead.counted.items() if value)
    console.print(f"counted while timing: {counted}")
    for figure in ("min", "median"):
        cost = overhead.per_add_us(figure)
        met = cost <= targets.STEP_OVERHEAD_US
        state = "[green]met[/green]" if met else "[red]missed[/red]"
        console.print(
            f"engine's own cost per step ({figure}): {cost:.3f} µs, "
            f"want ≤ {targets.STEP_OVERHEAD_US:.3f}: {state}"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adds", type=int, default=1000, help="additions a run (1000)")
    parser.add_argument("--size", type=int, default=16, help="floats in a tensor (16)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side (10)")
    parser.add_argument("--repeats", type=int, default=100, help="runs a turn (100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    options = parser.parse_args(arguments)
    for name in ("adds", "size", "rounds", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, want 1 or more")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    overhead = measure(options.adds, options.size, options.rounds, options.repeats)
    print_report(Console(), overhead, options.size)
    if options.json:
        figures = {f"{name}_us": overhead.per_add_us(name) for name in ("min", "median")}
        options.json.write_text(json.dumps(asdict(overhead) | figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
