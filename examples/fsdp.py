"""Train a transformer in several processes, each with a part of every parameter.

Start it with torchrun --nproc-per-node 2 examples/fsdp.py
"""

import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from command_line import Parser, run
from model import TransformerModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BACKENDS = ("ort", "ortmodule", "eager")


def shard(model: TransformerModel, backend: str) -> None:
    """Shard each layer by itself, so that one at a time is gathered, and then the rest.

    What gathers them stands around a layer's call. So a layer is one graph, and the whole is none.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = model.encoder.layers
    for i, layer in enumerate(layers):
        if backend == "ort":
            layer.compile(backend="ort")
        elif backend == "ortmodule":
            import torch_ort

            layers[i] = torch_ort.ORTModule(layer)
        fully_shard(layers[i], mesh=mesh)
    fully_shard(model, mesh=mesh)


def work(options: Namespace, parser: Parser) -> None:
    # Logits are a view, and nothing is written into them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    ranks.start(parser)
    text = ranks.read_text(options, parser)
    model = ranks.make_model(text, options)
    shard(model, options.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=ranks.LEARNING_RATE)
    losses = ranks.train(
        lambda step: ranks.train_step(model, optimizer, text, step), range(options.steps)
    )
    if options.save:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:  # the others get an empty dict
            torch.save(state, options.save)
    ranks.finish(losses, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit status."""
    parser = ranks.make_parser(__doc__, BACKENDS)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the whole model")
    options = parser.parse_args(arguments)
    return run(parser, lambda: work(options, parser))


if __name__ == "__main__":
    ranks.leave(main())
