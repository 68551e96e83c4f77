"""Train a transformer in several processes under DeepSpeed, which divides by ZeRO's stages.

Start it with torchrun --nproc-per-node 2 examples/deepspeed_zero.py
"""

import importlib.util
import logging
import os
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ranks
import torch.distributed as dist
from command_line import Parser, run, whole
from torch import nn

BACKENDS = ("ortmodule", "ort", "eager")
LEARNING_RATE = 1e-3


def start_deepspeed(model: nn.Module, options: Namespace) -> Any:
    """Return DeepSpeed's engine around the model, as the backend runs it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # An operator for ranks that share memory, which takes minutes to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if options.backend == "ortmodule":
        import torch_ort

        # Stage 3 gathers each layer of the encoder as a whole, and so a layer is one graph.
        os.environ.setdefault("ORTMODULE_ENABLE_ZERO_STAGE3", "1")
        model = torch_ort.ORTModule(model)
    # PyTorch's AdamW, as DeepSpeed's own for the CPU takes minutes to build.
    settings = {"lr": LEARNING_RATE, "torch_adam": True}
    config = {
        "train_batch_size": options.batch_size,
        "gradient_clipping": ranks.MAX_NORM,
        "optimizer": {"type": "AdamW", "params": settings},
        # 0: also parameters as small as these are divided.
        "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 0},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    if options.backend == "ort":
        engine.compile(backend="ort")
    return engine


def train_step(engine: Any, text: ranks.Text, step: int) -> float:
    """Train on one batch; return its loss, the mean over all ranks."""
    loss = ranks.loss_of(engine, text, step)
    engine.backward(loss)
    engine.step()
    return ranks.mean_over_ranks(loss)


def resume(engine: Any, folder: Path) -> int:
    """Read the last checkpoint, if there is one; return the number of steps that are done."""
    if not (folder / "latest").exists():
        return 0
    _, state = engine.load_checkpoint(str(folder))
    if dist.get_rank() == 0:
        print(f"goes on after step {state['steps']}", flush=True)
    return state["steps"]


def work(options: Namespace, parser: Parser) -> None:
    ranks.start(parser)
    if importlib.util.find_spec("deepspeed") is None:
        parser.error('deepspeed is not installed: pip install "torch-ort-engine[deepspeed]"')
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that PyTorch is giving up.
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    text = ranks.read_text(options, parser)
    engine = start_deepspeed(ranks.make_model(text, options), options)
    done = resume(engine, options.checkpoint) if options.checkpoint else 0

    def after(step: int, loss: float) -> None:
        if options.checkpoint and (step + 1) % options.every == 0:  # each rank writes its part
            engine.save_checkpoint(str(options.checkpoint), client_state={"steps": step + 1})

    losses = ranks.train(
        lambda step: train_step(engine, text, step),
        range(done, options.steps),
        LEARNING_RATE,
        after,
    )
    ranks.finish(losses, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit status."""
    parser = ranks.make_parser(__doc__, BACKENDS)
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO's stage")
    parser.add_argument("--checkpoint", type=Path, help="folder to write, and to go on from")
    parser.add_argument("--every", type=whole(1), default=50, help="steps between two checkpoints")
    options = parser.parse_args(arguments)
    return run(parser, lambda: work(options, parser))


if __name__ == "__main__":
    ranks.leave(main())
