"""What a call of a small model costs beside its kernels, and which part of that is whose.

    python benchmarks/call_overhead.py                # an MLP of 64 rows of 16 features, one thread
    python benchmarks/call_overhead.py --rows 8 --json call_overhead.json

Eager PyTorch, `torch.compile(backend="ort")`, an ORTModule, and `torch.compile` with a backend that
runs Dynamo's graph as it is, which shows what Dynamo itself takes, run the same model in turns: in
inference, under `torch.inference_mode()`, and in training, forward and backward. Then
`torch_ort.profile` says where the time of the engine's calls is spent.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

import torch_ort

WAYS = ("eager", "dynamo", "ort", "ortmodule")
WARM_UP = 30


def as_it_is(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile nothing: a backend that shows what Dynamo's guards and code cost."""
    return module.forward


def made(way: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    if way == "ort":
        return torch.compile(model, backend="ort")
    if way == "dynamo":
        return torch.compile(model, backend=as_it_is)
    return torch_ort.ORTModule(model) if way == "ortmodule" else model


def infer(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.inference_mode():
        call(x)


def train(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    call(x).sum().backward()


def in_turns(
    run: Callable[[Callable[[Tensor], Tensor], Tensor], None],
    model: nn.Module,
    x: Tensor,
    turns: int,
) -> dict[str, list[float]]:
    """Give microseconds of each call, by way."""
    calls = {way: made(way, copy.deepcopy(model)) for way in WAYS}
    for call in calls.values():
        for _ in range(WARM_UP):
            run(call, x)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way, call in calls.items():
            start = time.perf_counter()
            run(call, x)
            taken[way].append((time.perf_counter() - start) * 1e6)
    return taken


def parts_of(model: nn.Module, x: Tensor, steps: int, is_training: bool) -> dict[str, float]:
    """Give the microseconds of a call in the engine's kernels and outside of them, by part.

    They have those of the profiler in them, about one for each event.
    """
    model = copy.deepcopy(model)
    if not is_training:
        model.requires_grad_(False)
    profiled = torch_ort.profile(model, x, steps=steps)
    parts = {"kernels": sum(profiled.kinds.values()), **profiled.outside}
    return {name: profiled.per_step(spent) for name, spent in parts.items()}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure, and print both tables."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    features = options.features
    model = nn.Sequential(
        nn.Linear(features, 4 * features), nn.ReLU(), nn.Linear(4 * features, features)
    )
    x = torch.randn(options.rows, features)
    console = Console()
    figures: dict[str, Any] = {"threads": options.threads, "calls": {}, "parts": {}}
    table = Table(title=f"{options.rows} rows of {features} features: microseconds of a call")
    for head in ("", *(f"{way}, {figure}" for way in WAYS for figure in ("min", "median"))):
        table.add_column(head, justify="right" if head else "left")
    for name, run in (("inference", infer), ("training", train)):
        torch.compiler.reset()
        torch_ort.reset_counters()
        taken = in_turns(run, model, x, options.turns)
        assert torch_ort.counters()["fallbacks"] == 0
        figures["calls"][name] = {way: [min(each), median(each)] for way, each in taken.items()}
        cells = [f"{each:.1f}" for pair in figures["calls"][name].values() for each in pair]
        table.add_row(name, *cells)
    console.print(table)
    for name, is_training in (("inference", False), ("training", True)):
        parts = parts_of(model, x, min(options.turns, 500), is_training)
        figures["parts"][name] = parts
        console.print(f"{name}, by part, with the profiler's own time:")
        for part, spent in sorted(parts.items(), key=lambda each: -each[1]):
            console.print(f"  {part}: {spent:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
