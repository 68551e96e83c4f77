"""What a PythonOp costs beside calling its Function directly, on tensors of one element.

Chains of different length run in an ORTModule; from their difference comes the time of one step,
so that what a call of the module costs does not count. The same chains run in eager PyTorch.
Rounds are interleaved, and the least and the median of each are shown.

    python benchmarks/python_op.py
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_ort


class Plain(torch.autograd.Function):
    """Does next to nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Add one."""
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Give another gradient than one would derive."""
        return grad * 2


class Saving(torch.autograd.Function):
    """Saves an argument, takes a number, and multiplies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Multiply."""
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        """Multiply by what was saved."""
        (x,) = ctx.saved_tensors
        return grad * x, None


FUNCTIONS = {"plain": Plain.apply, "saving": lambda x: Saving.apply(x, 0.5)}


class Chain(nn.Module):
    """A Function, some number of times."""

    def __init__(self, function: Callable[..., Any], length: int) -> None:
        super().__init__()
        self.function, self.length = function, length
        self.start = nn.Parameter(torch.ones(1))

    def forward(self) -> torch.Tensor:
        """Give the end of the chain."""
        x = self.start
        for _ in range(self.length):
            x = self.function(x)
        return x


def step_times(model: Callable[[], torch.Tensor], gradient: torch.Tensor) -> tuple[float, float]:
    """Time one forward and one backward, in microseconds."""
    start = time.perf_counter()
    result = model()
    middle = time.perf_counter()
    result.backward(gradient)
    end = time.perf_counter()
    return 1e6 * (middle - start), 1e6 * (end - middle)


def measure(function: Callable[..., Any], rounds: int, short: int, long: int) -> dict[str, Any]:
    """Give, by who runs it and which half, the microseconds of one call in each round."""
    chains = {length: Chain(function, length) for length in (short, long)}
    models = {
        (who, length): torch_ort.ORTModule(chain) if who == "engine" else chain
        for length, chain in chains.items()
        for who in ("eager", "engine")
    }
    gradient = torch.ones(1)
    for model in models.values():
        for _ in range(20):
            step_times(model, gradient)
    times: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in models}
    for _ in range(rounds):
        for key, model in models.items():
            times[key].append(step_times(model, gradient))
    found = {}
    for who in ("eager", "engine"):
        for half, name in enumerate(("forward", "backward")):
            few = [pair[half] for pair in times[who, short]]
            many = [pair[half] for pair in times[who, long]]
            for kind, of in (("min", min), ("median", statistics.median)):
                found[who, name, kind] = (of(many) - of(few)) / (long - short)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--short", type=int, default=1)
    parser.add_argument("--long", type=int, default=41)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    print(
        f"{'function':10} {'half':9} {'eager':>15} {'PythonOp':>15} {'added':>15}   us, min/median"
    )
    for name, function in FUNCTIONS.items():
        found = measure(function, args.rounds, args.short, args.long)
        for half in ("forward", "backward"):
            eager, engine = (
                [found[who, half, kind] for kind in ("min", "median")]
                for who in ("eager", "engine")
            )
            cells = [eager, engine, [b - a for a, b in zip(eager, engine, strict=True)]]
            texts = " ".join(f"{least:7.2f}/{median:7.2f}" for least, median in cells)
            print(f"{name:10} {half:9} {texts}")
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0, counters
    assert counters["steps_python"] > 0, counters


if __name__ == "__main__":
    main()
