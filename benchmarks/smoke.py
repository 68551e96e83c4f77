"""A few steps of a tiny language model beside eager PyTorch: what a new GPU runs first.

    python benchmarks/smoke.py --device cuda              # some seconds
    python benchmarks/smoke.py --device cuda --check 2    # every step of the engine is checked

Prints losses, how far gradients are apart, and what the engine ran. The exit status is 1 where
numbers differ by more than rounding, or where eager PyTorch ran something.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from collections.abc import Sequence

import torch
from models import LanguageModel

import torch_ort

# What may differ, in parts of the largest number of a tensor.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
LEFT = ("fallbacks", "graph_breaks", "frames_left_to_eager", "calls_left_to_eager")
WORDS, LENGTH = 1001, 64  # so that rows of logits have an odd length


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Give the largest difference, in parts of the largest number."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=TOLERANCES, default="bfloat16", help="of autocast")
    parser.add_argument("--check", type=int, default=0, help="the engine's option of that name")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it; gives the exit status."""
    options = parse(arguments)
    torch.manual_seed(0)
    model = LanguageModel(WORDS, options.width, 4, 2, LENGTH).to(options.device).eval()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort", options={"check": options.check})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, eager)]

    def precision() -> contextlib.AbstractContextManager:
        if options.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(options.device, getattr(torch, options.dtype))

    worst = 0.0
    for step in range(options.steps):
        text = torch.randint(WORDS, (4, LENGTH + 1)).to(options.device)
        losses = []
        for call, optimizer in zip((compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            with precision():
                losses.append(call(text[:, :-1], text[:, 1:]))
            losses[-1].backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        gradients = max(apart(mine.grad, theirs.grad) for mine, theirs in pairs)
        worst = max(worst, apart(*losses), gradients)
        print(
            f"step {step}: loss {losses[0].item():.6f}, eager {losses[1].item():.6f}, gradients "
            f"apart by {gradients:.2e} of the largest"
        )
        # Both go on from the same weights: Adam makes whole steps of rounding.
        optimizers[1].step()
        model.load_state_dict(eager.state_dict())
    counters = torch_ort.counters()
    ran = ("forward_runs", "backward_runs", "steps_region", *LEFT)
    print(", ".join(f"{name} {counters[name]}" for name in ran))
    problems = [f"{name}: {counters[name]}, want 0" for name in LEFT if counters[name]]
    if not worst <= TOLERANCES[options.dtype]:  # NaN is a problem too
        problems.append(f"numbers apart by {worst:.2e}, want {TOLERANCES[options.dtype]:.0e}")
    for problem in problems:
        print(f"smoke: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
