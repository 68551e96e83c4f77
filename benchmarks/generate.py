"""How long a token takes that Hugging Face's `generate` makes, beside eager PyTorch and inductor.

    python benchmarks/generate.py
    python benchmarks/generate.py --sizes gpt2 --caches dynamic --threads 2 --tokens 32

GPT-2 with random weights continues one text. A dynamic cache grows with each token, so each call
has other sizes; a static one has the same all along. All backends share the weights of one model,
stand in one process, and take turns of a whole text each, so that a slow minute falls on all. A
turn begins with a prompt that is longer than those before: its sizes are new, as those of a user's
texts are.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import torch_ort

SIZES = {
    "small": {"n_layer": 4, "n_embd": 256, "n_head": 4},
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
}
# What `generate` is told. Without `disable_compile` the library itself compiles a model with a
# static cache, by inductor.
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}
BACKENDS = ("inductor", "ort")
PROMPT_TOKENS = 16


@dataclass
class Side:
    """One backend with one cache."""

    backend: str
    cache: str
    model: Any
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)  # of a token, by turn
    token_ids: list[torch.Tensor] = field(default_factory=list)

    def generate(self, prompt: torch.Tensor, count: int) -> float:
        """Continue the prompt by so many tokens; return the seconds of all."""
        settings = {"max_new_tokens": count, "do_sample": False} | CACHES[self.cache]
        begin = time.perf_counter()
        made = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        seconds = time.perf_counter() - begin
        self.token_ids.append(made)
        return seconds


def make_model(size: str) -> Any:
    """Make a GPT-2 that never ends a text."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES[size])).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def make_side(model: Any, backend: str, cache: str) -> Side:
    """Give the weights of a model to one backend."""
    own = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        own.get_parameter(name).data = parameter.data
    if backend != "eager":
        dynamic = True if cache == "dynamic" else None
        own.forward = torch.compile(own.forward, backend=backend, dynamic=dynamic)
    return Side(backend, cache, own)


def measure(sides: list[Side], tokens: int, rounds: int) -> None:
    """Let all sides take turns."""
    longest = PROMPT_TOKENS + (rounds + 1) * tokens
    prompt = torch.randint(0, 50_000, (1, longest))
    with torch.no_grad():
        for side in sides:
            side.first_s = side.generate(prompt[:, :PROMPT_TOKENS], tokens)
        for turn in range(rounds):
            length = PROMPT_TOKENS + (turn + 1) * tokens
            shift = turn % len(sides)
            for side in sides[shift:] + sides[:shift]:
                side.seconds.append(side.generate(prompt[:, :length], tokens) / tokens)


def row(side: Side, eager: Side) -> list[str]:
    """Give the figures of a side, beside those of eager PyTorch."""
    ratios = [a / b for a, b in zip(side.seconds, eager.seconds, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(side.token_ids, eager.token_ids, strict=True))
    return [
        side.cache,
        side.backend,
        f"{1000 * min(side.seconds):.2f}",
        f"{1000 * statistics.median(side.seconds):.2f}",
        f"{min(side.seconds) / min(eager.seconds):.2f}",
        f"{statistics.median(ratios):.2f}",
        f"{side.first_s:.2f}",
        "yes" if same else "no",
    ]


def main() -> None:
    """Measure and print a table for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small"])
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--tokens", type=int, default=64, help="of a text (64)")
    parser.add_argument("--rounds", type=int, default=7, help="texts of each backend (7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    if min(given.tokens, given.rounds, given.threads) < 1:
        parser.error("--tokens, --rounds, --threads: want 1 or more")
    if PROMPT_TOKENS + (given.rounds + 2) * given.tokens > transformers.GPT2Config().n_positions:
        parser.error("--tokens, --rounds: the texts get longer than the model's positions")
    torch.set_num_threads(given.threads)
    # All sides run the code of one `forward`, and Dynamo counts the graphs of all together.
    torch._dynamo.config.recompile_limit = 64
    transformers.utils.logging.set_verbosity_error()
    console = Console()
    for size in given.sizes:
        model = make_model(size)
        table = Table(
            "cache", "backend", "min ms", "median", "min / eager", "median / eager",
            "first text s", "eager's tokens",
            title=f"a token of {size}, {given.threads} thread(s)",
        )  # fmt: skip
        for cache in given.caches:
            torch.compiler.reset()
            sides = [make_side(model, each, cache) for each in ("eager", *given.backends)]
            measure(sides, given.tokens, given.rounds)
            for side in sides:
                table.add_row(*row(side, sides[0]))
        console.print(table)
    counted = torch_ort.counters()
    names = ("fallbacks", "frames_left_to_eager", "calls_left_to_eager", "graph_breaks")
    console.print(", ".join(f"{name} {counted[name]}" for name in names))


if __name__ == "__main__":
    main()
