"""Steps of optimizers: torch_ort's beside PyTorch's, and beside a copy of as many bytes.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --only FusedAdam AdamW --threads 1 --json optimizers.json
    python benchmarks/optimizers.py --device cuda --width 1024

The parameters are the 150 tensors of a language model with 20 million parameters, in float32. All
sides stand in one process, each with parameters of its own, and take turns, which end when the
device is done.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import targets
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from torch_ort import optim

WIDTH, BLOCKS, VOCABULARY, LENGTH = 320, 12, 16_000, 256
DECAY = {"weight_decay": 0.01}
TURN_STEPS = 3
Params = list[nn.Parameter]
Make = Callable[[Params], Callable[[], object]]  # gives what takes one step


@dataclass(frozen=True)
class Case:
    """A step of ours, the same in PyTorch, and how many numbers it moves for one of the model."""

    ours: Make
    moves: int  # reads and writes
    fused: Make | None = None  # PyTorch's fused=True
    default: Make | None = None


def _torch(name: str, clip: bool = False, **arguments: object) -> Make:
    def make(params: Params) -> Callable[[], object]:
        optimizer = getattr(torch.optim, name)(params, **arguments)

        def step() -> None:
            if clip:
                nn.utils.clip_grad_norm_(params, 1e9)
            optimizer.step()

        return step

    return make


def _ours(name: str, max_norm: float | None = None, **arguments: object) -> Make:
    def make(params: Params) -> Callable[[], object]:
        optimizer = getattr(optim, name)(params, **arguments)
        return optimizer.step if max_norm is None else lambda: optimizer.step(max_norm=max_norm)

    return make


def _same(name: str, moves: int, **arguments: object) -> Case:
    """Give a class of `torch.optim` that we have as well."""
    theirs = (_torch(name, fused=fused, **arguments) for fused in (True, None))
    return Case(_ours(name, **arguments), moves, *theirs)


ADAM_W = _torch("AdamW", fused=True, **DECAY), _torch("AdamW", **DECAY)
CASES = {
    "SGD": _same("SGD", 3),
    "SGD, momentum": _same("SGD", 5, momentum=0.9),
    "Adam": _same("Adam", 7),
    "AdamW": _same("AdamW", 7, **DECAY),
    "FusedAdam, mode 0": Case(
        _ours("FusedAdam", adam_w_mode=0, **DECAY), 7, _torch("Adam", fused=True, **DECAY),
        _torch("Adam", **DECAY),
    ),
    "FusedAdam, mode 1": Case(_ours("FusedAdam", adam_w_mode=1, **DECAY), 7, *ADAM_W),
    "FusedAdam, mode 2": Case(_ours("FusedAdam", adam_w_mode=2, **DECAY), 7, *ADAM_W),
    "FusedAdam, clipped": Case(
        _ours("FusedAdam", max_norm=1e9, adam_w_mode=2, **DECAY), 8,
        _torch("AdamW", clip=True, fused=True, **DECAY), _torch("AdamW", clip=True, **DECAY),
    ),
    "Lamb": Case(_ours("Lamb", **DECAY), 10),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Seconds of a step of each side, turn by turn; an empty list: there is no such side."""

    name: str
    threads: int
    ours: list[float]
    fused: list[float]
    default: list[float]
    copy: list[float]

    def ratio(self, others: list[float]) -> tuple[float, float]:
        """Give our time over another: of the fastest turns, and the median over the turns."""
        turns = [a / b for a, b in zip(self.ours, others, strict=True)]
        return min(self.ours) / min(others), median(turns)


def sizes(width: int = WIDTH) -> list[tuple[int, ...]]:
    """Give the sizes of a causal language model's parameters."""
    block = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    rest = [(VOCABULARY, width), (LENGTH, width), (width,), (width,), (width, width), (width,)]
    return block * BLOCKS + rest


def make_parameters(of: list[tuple[int, ...]], device: str) -> Params:
    params = [nn.Parameter(torch.randn(size, device=device)) for size in of]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def copying(moves: int, of: list[tuple[int, ...]], device: str) -> Callable[[], object]:
    """Give a copy that reads half of these numbers and writes the other half."""
    source = torch.randn(sum(map(math.prod, of)) * moves // 2, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure(name: str, of: list[tuple[int, ...]], turns: int, threads: int, device: str) -> Row:
    case = CASES[name]
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    sides = {"copy": copying(case.moves, of, device)}
    for side in ("ours", "fused", "default"):
        make = getattr(case, side)
        if make is not None:
            sides[side] = make(make_parameters(of, device))
    seconds: dict[str, list[float]] = {side: [] for side in ("ours", "fused", "default", "copy")}
    for step in sides.values():
        step()
        step()
    order = list(sides)
    for turn in range(turns):
        for side in order[turn % len(order) :] + order[: turn % len(order)]:
            step = sides[side]
            step()  # what the side before has left in the caches
            wait()
            start = time.perf_counter()
            for _ in range(TURN_STEPS):
                step()
            wait()
            seconds[side].append((time.perf_counter() - start) / TURN_STEPS)
    return Row(name, threads, **seconds)


def table(rows: list[Row], title: str) -> Table:
    result = Table(title=title)
    for head in ("optimizer", "ms", "/ fused=True", "/ default", "of a copy's speed"):
        result.add_column(head, justify="left" if head == "optimizer" else "right")
    for row in rows:
        cells = [f"{min(row.ours) * 1e3:.2f} ({median(row.ours) * 1e3:.2f})"]
        for others in (row.fused, row.default):
            cells.append("{:.2f} ({:.2f})".format(*row.ratio(others)) if others else "")
        cells.append("{:.2f} ({:.2f})".format(*(1 / ratio for ratio in row.ratio(row.copy))))
        result.add_row(row.name, *cells)
    return result


def verdicts(rows: list[Row]) -> list[str]:
    """Say whether FusedAdam reaches what is asked of it, by the fastest turns."""
    lines = []
    for row in rows:
        if row.name not in ("FusedAdam, mode 0", "FusedAdam, mode 1", "FusedAdam, mode 2"):
            continue
        over_fused, of_copy = row.ratio(row.fused)[0], 1 / row.ratio(row.copy)[0]
        for what, got, sign, want, met in (
            ("PyTorch's fused", over_fused, "≤", targets.FUSED_ADAM_VS_TORCH,
             over_fused <= targets.FUSED_ADAM_VS_TORCH),
            ("a copy's speed", of_copy, "≥", targets.FUSED_ADAM_OF_COPY,
             of_copy >= targets.FUSED_ADAM_OF_COPY),
        ):  # fmt: skip
            state = "met" if met else "missed"
            lines.append(f"{row.name} against {what}: {state} ({got:.2f}, want {sign} {want})")
    return lines


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME",
                        help=f"names that begin so, of {'; '.join(CASES)}")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the language model")
    parser.add_argument("--threads", type=int, nargs="+",
                        help="where nothing is said 1 and 2, beside a GPU 1")  # fmt: skip
    parser.add_argument("--turns", type=int, default=16, help="of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    console = Console(width=110)
    torch.manual_seed(0)
    of, rows = sizes(options.width), []
    names = [name for name in CASES if name.startswith(tuple(options.only))]
    for threads in options.threads or ([1, 2] if options.device == "cpu" else [1]):
        torch.set_num_threads(threads)
        rows.append([measure(name, of, options.turns, threads, options.device) for name in names])
        title = (
            f"{len(of)} tensors, {sum(map(math.prod, of)) / 1e6:.1f} million, {options.device}, "
            f"threads: {threads}"
        )
        console.print(table(rows[-1], f"{title}; fastest turn (median)"))
        for line in verdicts(rows[-1]):
            console.print(line, highlight=False)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items()}
        measured = [asdict(row) for each in rows for row in each]
        options.json.write_text(json.dumps({"settings": settings, "rows": measured}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
