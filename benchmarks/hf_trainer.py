"""A training run of a small GPT-2: Hugging Face's Trainer and the engine, beside the same without.

    python benchmarks/hf_trainer.py --json trainer.json
    python benchmarks/hf_trainer.py --steps 40 --windows 4 --seeds 2

The model is made from a configuration and learns nine plays, byte by byte. Each side trains in a
process of its own: Trainer and a loop of our own, each in the engine and in eager PyTorch, and the
eager loop again with other seeds, which tell how far apart two curves of the loss may be. Sides
take turns of some steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO

import targets
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

PLAYS = Path(__file__).parents[1] / "examples" / "data" / "plays"
WIDTH, LAYERS, HEADS, LENGTH = 128, 2, 4, 128
LEARNING_RATE, MAX_NORM = 1e-3, 1.0
ROADS = ("module", "ort")


@dataclass
class Side:
    """Who trains, on which road, with which seed; then what came of it."""

    trainer: str  # "Trainer" or "loop"
    road: str  # "eager", or one of ROADS
    seed: int
    seconds: list[float] = field(default_factory=list)  # of each turn, the first one left out
    curve: list[float] = field(default_factory=list)  # mean loss of each window of steps
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What a table calls it."""
        return f"{self.trainer}, {self.road}, seed {self.seed}"


class Pieces(Dataset):
    """Pieces of the plays in the order in which a run takes them, each LENGTH bytes long."""

    def __init__(self, count: int, seed: int) -> None:
        text = b"".join(path.read_bytes() for path in sorted(PLAYS.glob("*.txt")))
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        generator = torch.Generator().manual_seed(seed)
        last = len(self.ids) - LENGTH
        self.starts = torch.randint(last, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.ids[self.starts[index] : self.starts[index] + LENGTH]
        return {"input_ids": piece, "labels": piece}


# What a worker does.


class Turns:
    """Waits for a line before each turn of some steps, and answers with the time that it took.

    The first turn seeds PyTorch: up to there, sides draw as many numbers as they like.
    """

    def __init__(self, steps: int, seed: int, asked: TextIO, answers: TextIO) -> None:
        self._steps, self._seed = steps, seed
        self._asked, self._answers = asked, answers
        self._start: float | None = None

    def before_step(self, step: int) -> None:
        """Be told that a step begins."""
        if step % self._steps == 0:
            self.end()
            self._asked.readline()
            if step == 0:
                torch.manual_seed(self._seed)
            self._start = time.perf_counter()

    def end(self) -> None:
        """End the turn, if there is one."""
        if self._start is not None:
            self.answer({"seconds": time.perf_counter() - self._start})
            self._start = None

    def answer(self, content: dict[str, Any]) -> None:
        """Write a line for the parent."""
        print(json.dumps(content), file=self._answers, flush=True)


def make_model(seed: int) -> torch.nn.Module:
    """Make the same model for the same seed."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(seed)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else forward logs that it takes this one, a graph break
    return model


def train_by_trainer(side: Side, options: argparse.Namespace, turns: Turns) -> list[float]:
    """Train by transformers.Trainer; give the mean loss of each window."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    import torch_ort

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.before_step(state.global_step)

    model = make_model(side.seed)
    compiled = {"torch_compile": True, "torch_compile_backend": "ort"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=torch_ort.ORTModule(model) if side.road == "module" else model,
            train_dataset=Pieces(options.steps * options.batch_size, side.seed),
            callbacks=[TakeTurns()],
            args=TrainingArguments(
                output_dir=folder, max_steps=options.steps, report_to=[], save_strategy="no",
                logging_steps=options.steps // options.windows, use_cpu=True, disable_tqdm=True,
                per_device_train_batch_size=options.batch_size, learning_rate=LEARNING_RATE,
                max_grad_norm=MAX_NORM, seed=side.seed, train_sampling_strategy="sequential",
                **(compiled if side.road == "ort" else {}),
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_by_loop(side: Side, options: argparse.Namespace, turns: Turns) -> list[float]:
    """Do what the Trainer does in a loop of our own; give the mean loss of each window."""
    import torch_ort

    model = make_model(side.seed).train()
    call: Callable[..., Any] = model
    if side.road == "module":
        call = torch_ort.ORTModule(model)
    elif side.road == "ort":
        call = torch.compile(model, backend="ort")
    pieces = Pieces(options.steps * options.batch_size, side.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    window = options.steps // options.windows
    curve, total = [], torch.zeros(())
    for step, batch in enumerate(DataLoader(pieces, options.batch_size)):
        turns.before_step(step)
        loss = call(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if (step + 1) % window == 0:
            curve.append(total.item() / window)
            total.zero_()
    return curve


def work(side: Side, options: argparse.Namespace) -> None:
    """Be a worker: train in turns, then say what came of it."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    import torch_ort

    torch.set_num_threads(options.threads)
    turns = Turns(options.turn_steps, side.seed, sys.stdin, answers)
    train = train_by_trainer if side.trainer == "Trainer" else train_by_loop
    curve = train(side, options, turns)
    turns.end()
    turns.answer({"curve": curve, "counters": dict(torch_ort.counters())})


# What the parent does.


@contextmanager
def started(side: Side, arguments: Sequence[str], threads: int) -> Iterator[subprocess.Popen]:
    """Start a worker, and end it with the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if side.road != "eager":
        environment["TORCH_ORT_STRICT"] = "1"
    worker = [f"--worker={side.trainer}:{side.road}:{side.seed}"]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments, *worker],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(process: subprocess.Popen) -> dict[str, Any]:
    """Give a worker its turn; raises RuntimeError if it died."""
    process.stdin.write("\n")
    process.stdin.flush()
    return hear(process)


def hear(process: subprocess.Popen) -> dict[str, Any]:
    """Read an answer; raises RuntimeError if the worker died."""
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args[-1]} died with status {process.wait()}")
    return json.loads(line)


def measure(sides: list[Side], options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Let all sides train, turn by turn, the first one of which rotates."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(side, arguments, options.threads)) for side in sides
        ]
        for turn in range(options.steps // options.turn_steps):
            first = turn % len(sides)
            for i in (*range(first, len(sides)), *range(first)):
                time.sleep(0.25)  # until the threads of the one before sleep
                seconds = ask(processes[i])["seconds"]
                if turn > 0:  # captures, and all that comes once
                    sides[i].seconds.append(seconds)
        for side, process in zip(sides, processes, strict=True):
            answer = hear(process)
            side.curve, side.counters = answer["curve"], answer["counters"]


def distance(one: Side, other: Side) -> float:
    """Give how far two curves are apart: the mean over all windows."""
    return fmean(abs(a - b) for a, b in zip(one.curve, other.curve, strict=True))


def spread(sides: list[Side]) -> float:
    """Give how far eager's own curves are apart at most, from seed to seed."""
    loops = [side for side in sides if (side.trainer, side.road) == ("loop", "eager")]
    return max(distance(one, other) for one, other in combinations(loops, 2))


def find(sides: list[Side], trainer: str, road: str) -> Side:
    """Find a side by name, with the first seed."""
    return next(side for side in sides if (side.trainer, side.road) == (trainer, road))


def table(sides: list[Side], options: argparse.Namespace) -> Table:
    """Show samples a second, by the fastest turn and the median one, and losses."""
    samples = options.turn_steps * options.batch_size
    eager = find(sides, "loop", "eager")
    result = Table(title=f"{options.steps} steps of {options.batch_size} samples")
    for head in ("side", "samples/s", "/ eager loop", "first loss", "last loss", "from eager"):
        result.add_column(head, justify="left" if head == "side" else "right")
    for side in sides:
        ratios = [b / a for a, b in zip(side.seconds, eager.seconds, strict=True)]
        result.add_row(
            side.name,
            f"{samples / min(side.seconds):.1f} ({samples / median(side.seconds):.1f})",
            f"{median(ratios):.3f}",
            f"{side.curve[0]:.4f}",
            f"{side.curve[-1]:.4f}",
            f"{distance(side, eager):.4f}",
        )
    return result


def verdicts(sides: list[Side], roads: Sequence[str]) -> list[str]:
    """Say whether the Trainer reaches its targets on each road."""
    lines, limit = [], spread(sides)
    eager = find(sides, "loop", "eager")
    for road in roads:
        trainer, loop = find(sides, "Trainer", road), find(sides, "loop", road)
        ratio = median(b / a for a, b in zip(trainer.seconds, loop.seconds, strict=True))
        wanted = targets.TRAINER_VS_LOOP
        state = "met" if ratio >= wanted else "missed"
        lines.append(
            f"Trainer against the same loop, {road}: {state} ({ratio:.3f}, want ≥ {wanted})"
        )
        for side in (trainer, loop):
            apart = distance(side, eager)
            state = "met" if apart <= limit else "missed"
            if any(side.counters[name] for name in ("fallbacks", "graph_breaks")):
                state = "missed, not all in the engine"
            lines.append(
                f"curve of {side.name}: {state} ({apart:.4f} from eager's, want ≤ {limit:.4f}, "
                "which eager's own are apart)"
            )
    return lines


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a step")
    parser.add_argument("--roads", nargs="+", choices=ROADS, default=list(ROADS))
    parser.add_argument("--seeds", type=int, default=3, help="of the eager loop; two or more")
    parser.add_argument("--turn-steps", type=int, default=50, help="steps of a turn, at most")
    parser.add_argument("--windows", type=int, default=20, help="parts of a curve")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.turn_steps = min(options.turn_steps, options.steps // 2)
    if options.seeds < 2:
        parser.error(f"--seeds: got {options.seeds}, want 2 or more")
    if options.windows < 1 or options.steps < 2 or options.steps % options.windows:
        parser.error(f"--steps: got {options.steps}, want a multiple of {options.windows} windows")
    if options.steps % options.turn_steps:
        parser.error(f"--steps: got {options.steps}, want a multiple of {options.turn_steps} steps")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    if options.worker:
        trainer, road, seed = options.worker.split(":")
        work(Side(trainer, road, int(seed)), options)
        return 0
    roads = ("eager", *options.roads)
    sides = [Side(trainer, road, 0) for road in roads for trainer in ("loop", "Trainer")]
    sides += [Side("loop", "eager", seed) for seed in range(1, options.seeds)]
    measure(sides, options, arguments)
    console = Console(width=110)
    console.print(table(sides, options))
    for line in verdicts(sides, options.roads):
        console.print(line, highlight=False, soft_wrap=True)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items()}
        measured = {"settings": settings, "sides": [asdict(side) for side in sides]}
        options.json.write_text(json.dumps(measured, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
