"""Trains for many steps with all that interrupts training, and measures what stays in memory.

    python tests/soak/soak.py --steps 20000 --road ortmodule

Sizes change, training and evaluation alternate, forwards are dropped, errors strike in the middle
of steps, and graphs are captured again. The resident set, the tensors alive and the engine's
contexts have to be flat to 1% once they have settled.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torch_ort
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import DebugOptions, LogLevel

WIDTH = 16
SLACK = 0.01


class Net(nn.Module):
    """Attention, norms, dropout and statistics; forward fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.scale = 1.0
        self.fails = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        hidden = x + F.dropout(mixed, 0.1, self.training) * self.scale
        if self.fails:
            raise Asked("in forward")
        pooled = self.statistics(hidden.transpose(1, 2)).mean(-1)
        logits = self.head(F.gelu(pooled))
        return F.cross_entropy(logits, labels), logits


class Asked(Exception):
    """An error that a step asks for."""


@dataclass(frozen=True)
class Measure:
    """What is in memory after a step."""

    resident: int  # bytes
    tensors: int
    contexts: int

    @staticmethod
    def now() -> Measure:
        """Collect garbage and measure."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        contexts = torch_ort.counters()["contexts_live"]
        return Measure(pages * resource.getpagesize(), tensors, contexts)


class Soak:
    """A model on one of the engine's roads, and steps of it."""

    def __init__(self, road: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._random = random.Random(seed)
        self._net = Net()
        self._road = road
        self._call = self._made()
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01, momentum=0.9)
        self.counts: Counter[str] = Counter()  # of steps by their kind

    def _made(self) -> Callable[..., Any]:
        if self._road == "ortmodule":
            return torch_ort.ORTModule(self._net, DebugOptions(log_level=LogLevel.ERROR))
        return torch.compile(self._net, backend="ort", dynamic=True)

    def step(self) -> None:
        """Do one step of a kind that chance chooses."""
        kind = self._random.choices(list(_KINDS), [weight for _, weight in _KINDS.values()])[0]
        self.counts[kind] += 1
        self._net.train()
        self._net.scale = self._random.choice((0.5, 1.0))
        _KINDS[kind][0](self)
        self._optimizer.zero_grad()

    def _inputs(self, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = self._random.randint(2, 9), self._random.randint(3, 12)
        return torch.randn(batch, length, width), torch.randint(4, (batch,))

    def train(self) -> None:
        """Go forward and backward, and update."""
        self._call(*self._inputs())[0].backward()
        self._optimizer.step()

    def evaluate(self) -> None:
        """Go forward without gradients."""
        self._net.eval()
        with self._random.choice((torch.no_grad, torch.inference_mode))():
            self._call(*self._inputs())

    def drop(self) -> None:
        """Go forward, and forget it."""
        self._call(*self._inputs())

    def overlap(self) -> None:
        """Go forward three times, and backward in another order."""
        losses = [self._call(*self._inputs())[0] for _ in range(3)]
        self._random.shuffle(losses)
        for loss in losses:
            loss.backward()

    def refuse(self) -> None:
        """Give what forward cannot take."""
        with contextlib.suppress(RuntimeError):
            self._call(*self._inputs(WIDTH - 1))
            raise AssertionError("a wrong size was taken")

    def fail_forward(self) -> None:
        """Let forward raise."""
        self._net.fails = True
        with expected():
            self._call(*self._inputs())
        self._net.fails = False

    def fail_before_backward(self) -> None:
        """Let the part of backward raise that comes before the graph's."""
        loss, logits = self._call(*self._inputs())
        logits.register_hook(_fail)
        with expected():
            (loss + logits.sum()).backward()

    def fail_after_backward(self) -> None:
        """Let the part of backward raise that comes after the graph's."""
        x, labels = self._inputs()
        x.requires_grad_().register_hook(_fail)
        with expected():
            self._call(x, labels)[0].backward()

    def recapture(self) -> None:
        """Forget what was captured."""
        if self._road == "ortmodule":
            self._call.recapture()
        else:
            torch.compiler.reset()
            self._call = self._made()
        self.train()


def _fail(gradient: torch.Tensor) -> None:
    raise Asked("in backward")


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """Raise AssertionError unless the error that was asked for comes."""
    try:
        yield
    except Asked:
        return
    except Exception as error:
        if "Asked" not in f"{type(error).__name__} {error}":
            raise
        return
    raise AssertionError("no error came")


_KINDS: dict[str, tuple[Callable[[Soak], None], float]] = {
    "train": (Soak.train, 60),
    "evaluate": (Soak.evaluate, 20),
    "drop": (Soak.drop, 5),
    "overlap": (Soak.overlap, 5),
    "refuse": (Soak.refuse, 1),
    "fail forward": (Soak.fail_forward, 1),
    "fail before backward": (Soak.fail_before_backward, 3),
    "fail after backward": (Soak.fail_after_backward, 3),
    "recapture": (Soak.recapture, 0.5),
}


def soak(road: str, steps: int, every: int, seed: int = 0) -> list[Measure]:
    """Do steps; measure now and then. Raises AssertionError where a step fell back."""
    run = Soak(road, seed)
    measures = []
    torch_ort.reset_counters()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        # Where forward raises for all that Dynamo knows, it leaves the call to eager PyTorch.
        warnings.filterwarnings("ignore", ".*Observed exception", FallbackWarning)
        for step in range(1, steps + 1):
            run.step()
            if step % every == 0:
                measures.append(Measure.now())
                print(f"{step}: {measures[-1]}", flush=True)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0, counters
    print(dict(run.counts))
    return measures


NAMES = ("resident", "tensors", "contexts")


def grown(measures: list[Measure], names: Sequence[str] = NAMES) -> list[str]:
    """Say what has grown since the first third of the measures, by more than the slack."""
    settled = len(measures) // 3
    said = []
    for name in names:
        values = [getattr(measure, name) for measure in measures]
        before, after = max(values[: settled + 1]), min(values[-3:])
        if after > before * (1 + SLACK):
            said.append(f"{name}: {before} after {settled + 1} measures, {after} at the end")
    return said


def main() -> int:
    """Soak; give 1 where something has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--road", choices=("ortmodule", "compile"), default="ortmodule")
    parser.add_argument("--every", type=int, default=500, help="steps between measures")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    found = grown(soak(chosen.road, chosen.steps, chosen.every, chosen.seed))
    print("\n".join(found) or "flat")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
