"""What the scripts of several processes share: how they start, their parts of a batch, the loop."""

import atexit
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from command_line import Parser, check_loss, print_counters, whole
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

# The model and the text are those of the short trio.
sys.path.insert(0, str(Path(__file__).resolve().parent / "getting_started"))
from model import TransformerModel
from text import Vocabulary, columns, read_splits, tokenize

LENGTH = 35
LEARNING_RATE = 1.0
MAX_NORM = 0.5


class Text(NamedTuple):
    """One rank's columns of the training text, int64 [words, columns], and the vocabulary."""

    columns: Tensor
    num_words: int


def make_parser(description: str | None, backends: tuple[str, ...]) -> Parser:
    """Return a parser with the options of all scripts."""
    parser = Parser(description)
    parser.add_argument("--backend", choices=backends, default=backends[0], help="who runs it")
    parser.add_argument("--steps", type=whole(1), default=200, help="steps of training in all")
    parser.add_argument("--batch-size", type=whole(1), default=20, help="columns, over all ranks")
    parser.add_argument("--width", type=whole(2), default=200, help="width of the model; even")
    parser.add_argument("--words", type=whole(1), help="read so many words of the plays only")
    parser.add_argument("--losses", type=Path, metavar="FILE.json", help="write every loss")
    return parser


def start(parser: Parser) -> None:
    """Join the other processes that torchrun has started, over gloo."""
    if "RANK" not in os.environ:
        parser.error(f"start it with torchrun --nproc-per-node 2 {parser.prog}")
    store, rank, ranks = next(rendezvous("env://"))
    # The store outlives a restart, and in it where the processes of before were to be found.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"life_{life}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    # Each process has its share of the processors.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))


def read_text(options: Namespace, parser: Parser) -> Text:
    """Give each rank its own columns of each batch, so that all ranks together read the batch."""
    ranks = dist.get_world_size()
    if options.batch_size % ranks:
        parser.error(f"--batch-size: got {options.batch_size}, want a multiple of {ranks} ranks")
    tokens = tokenize(read_splits().train)[: options.words]
    vocabulary = Vocabulary.of(tokens, min_frequency=3)
    whole_batch = columns(vocabulary.encode(tokens), options.batch_size)
    return Text(whole_batch[:, dist.get_rank() :: ranks].contiguous(), len(vocabulary))


def make_model(text: Text, options: Namespace) -> TransformerModel:
    """Make the model, with the same parameters on each rank."""
    torch.manual_seed(0)
    return TransformerModel(text.num_words, options.width, hidden_width=options.width)


def batch_of(text: Text, step: int) -> tuple[Tensor, Tensor]:
    """Give the words of a step, int64 [LENGTH, columns], and those that follow, flattened."""
    first = step * LENGTH % (len(text.columns) - LENGTH)
    part = text.columns[first : first + LENGTH + 1]
    return part[:-1], part[1:].reshape(-1)


def loss_of(model: nn.Module, text: Text, step: int) -> Tensor:
    """Run the model on this rank's part of a step's batch; return the loss there, float32 []."""
    # Dropout of a step does not depend on the steps before, so that a run can go on anywhere.
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    words, targets = batch_of(text, step)
    return nn.functional.cross_entropy(model(words).flatten(0, 1).float(), targets)


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of the losses of all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, step: int) -> float:
    """Train on one batch; return its loss, the mean over all ranks."""
    optimizer.zero_grad()
    loss = loss_of(model, text, step)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return mean_over_ranks(loss)


def train(
    one_step: Callable[[int], float], steps: Iterable[int], learning_rate: float = LEARNING_RATE,
    after: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:  # fmt: skip
    """Train for some steps, with a line for every tenth; `after` is called after each.

    `one_step` trains on a step's batch, and gives its loss.
    """
    losses = []
    for step in steps:
        loss = one_step(step)
        check_loss(loss, step + 1, learning_rate)
        losses.append(loss)
        after(step, loss)
        if (step + 1) % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    return losses


def finish(losses: list[float], options: Namespace) -> None:
    """Let the first rank print what its engine did, and write the losses; part."""
    if dist.get_rank() == 0:
        print_counters("eager" if options.backend == "eager" else "ort")
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this process as sys.exit does, but for Python's taking itself apart.

    Threads of gloo outlive the process group wherever PyTorch keeps a reference to it (PyTorch 2.13
    does, with any backend). One that lets go of a tensor while Python ends aborts the process.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
