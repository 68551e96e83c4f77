"""Train a transformer in several processes, each with a copy of the model, and survive crashes.

Start it with torchrun --nproc-per-node 2 --max-restarts 3 examples/ddp.py
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import checkpoint
import ranks
import torch
import torch.distributed as dist
from command_line import Parser, run, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ("ort", "ortmodule", "eager")


def wrap(model: nn.Module, backend: str) -> nn.Module:
    """Return the model as ranks train it together. An ORTModule goes innermost."""
    if backend == "ortmodule":
        import torch_ort

        return DistributedDataParallel(torch_ort.ORTModule(model))
    parallel = DistributedDataParallel(model)
    return torch.compile(parallel, backend="ort") if backend == "ort" else parallel


def resume(path: Path, settings: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the last checkpoint, if there is one; return the number of steps that are done."""
    if not path.exists():
        return 0
    state = checkpoint.load(path, settings)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if dist.get_rank() == 0:
        print(f"goes on after step {state['steps']}", flush=True)
    return state["steps"]


def work(options: Namespace, parser: Parser) -> None:
    ranks.start(parser)
    text = ranks.read_text(options, parser)
    model = ranks.make_model(text, options)
    parallel = wrap(model, options.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=ranks.LEARNING_RATE)
    settings = {"width": options.width, "words": text.num_words, "batch": options.batch_size}
    done = resume(options.checkpoint, settings, model, optimizer) if options.checkpoint else 0

    def after(step: int, loss: float) -> None:
        if options.checkpoint and (step + 1) % options.every == 0 and dist.get_rank() == 0:
            # The state dict is the model's own, whoever runs it.
            state = {"settings": settings, "steps": step + 1, "model": model.state_dict()}
            checkpoint.save(options.checkpoint, state | {"optimizer": optimizer.state_dict()})

    losses = ranks.train(
        lambda step: ranks.train_step(parallel, optimizer, text, step),
        range(done, options.steps),
        after=after,
    )
    ranks.finish(losses, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit status."""
    parser = ranks.make_parser(__doc__, BACKENDS)
    parser.add_argument("--checkpoint", type=Path, help="write it, and go on from it if it exists")
    parser.add_argument("--every", type=whole(1), default=50, help="steps between two checkpoints")
    options = parser.parse_args(arguments)
    return run(parser, lambda: work(options, parser))


if __name__ == "__main__":
    ranks.leave(main())
