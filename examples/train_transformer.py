"""Train a word-level transformer language model on real text.

The text is a set of plays, or your own file or folder. Each epoch ends with a checkpoint;
Ctrl-C keeps the last one and --resume goes on from it.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoint
import loss_curve
import torch
from command_line import (
    LossError,
    Parser,
    check_loss,
    compile_model,
    peak_memory_mib,
    positive,
    print_counters,
    print_step_times,
    probability,
    stop,
    whole,
)
from getting_started.model import TransformerModel
from getting_started.text import (
    PLAYS,
    Splits,
    TextError,
    Vocabulary,
    batches,
    columns,
    read_splits,
    tokenize,
)
from interrupt import Interrupt
from torch import Tensor, nn
from tqdm import tqdm

# Without a terminal there is no bar, but a line after so many seconds.
SECONDS_BETWEEN_LINES = 10.0
# A checkpoint goes on only under the same values of these: they change the numbers.
SETTINGS = [
    "batch_size",
    "bptt",
    "width",
    "heads",
    "hidden",
    "layers",
    "dropout",
    "lr",
    "gamma",
    "clip",
    "min_frequency",
    "seed",
]


def parse(argv: Sequence[str] | None) -> tuple[Parser, argparse.Namespace]:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_training_options(epochs=6)
    add = parser.add_argument
    add("--data", type=Path, default=PLAYS, help="a text file, or a folder of them")
    add("--checkpoint", type=Path, default=Path("transformer.pt"), help="where to keep the state")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--plot", type=Path, metavar="FILE.png", help="draw the loss curve")
    add("--batch-size", type=whole(1), default=20, help="columns of text read side by side")
    add("--bptt", type=whole(1), default=35, help="words of each column in a step")
    add("--width", type=whole(1), default=200, help="numbers that stand for a word")
    add("--heads", type=whole(1), default=2, help="attention heads")
    add("--hidden", type=whole(1), default=200, help="width inside the feed-forward part")
    add("--layers", type=whole(1), default=2, help="encoder layers")
    add("--dropout", type=probability, default=0.2, help="share of values that are dropped")
    add("--lr", type=positive, default=5.0, help="learning rate of SGD")
    add("--gamma", type=positive, default=0.95, help="factor on the learning rate, per epoch")
    add("--clip", type=positive, default=0.5, help="largest norm of the gradient")
    add("--min-frequency", type=whole(1), default=3, help="rarer words count as unknown")
    options = parser.parse_args(argv)
    parser.check_training_options(options)
    if options.width % options.heads:
        parser.error(f"--width: got {options.width}, want a multiple of --heads {options.heads}")
    if options.plot:
        try:
            loss_curve.check_format(options.plot)
        except ValueError as error:
            parser.error(str(error))
    return parser, options


def perplexity(loss: float) -> float:
    """Return e to the loss per word: among how many words the model is undecided."""
    return math.exp(loss) if loss < 700 else math.inf


class Training:
    """A run: the model, what trains it, its text, and what was measured so far."""

    def __init__(self, options: argparse.Namespace, tokens: Splits, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self.options = options
        self.vocabulary = Vocabulary.of(tokens.train, options.min_frequency)
        self.text = Splits(
            *(
                columns(self.vocabulary.encode(part), options.batch_size).to(options.device)
                for part in tokens
            )
        )
        self.model = TransformerModel(
            len(self.vocabulary),
            options.width,
            options.heads,
            options.hidden,
            options.layers,
            options.dropout,
            max_length=options.bptt,
        ).to(options.device)
        self.compiled = compile_model(self.model, options.backend)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=options.gamma)
        self.epoch = 0
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.best = math.inf
        self.best_weights = self.weights()
        self.step_seconds: list[float] = []
        self.checkpointed = False

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the parameters."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for a checkpoint to fit this run."""
        settings = {name: getattr(self.options, name) for name in SETTINGS}
        return settings | {"words of training text": self.text.train.numel()}

    def save(self) -> None:
        """Write the checkpoint of a finished epoch."""
        state = {
            "settings": self.settings(),
            "vocabulary": self.vocabulary.words,
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "best": self.best,
            "best_weights": self.best_weights,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": checkpoint.random_state(self.options.device),
            "losses": self.losses,
            "validation": self.validation,
        }
        checkpoint.save(self.options.checkpoint, state)
        self.checkpointed = True

    def resume(self) -> None:
        """Go back to the checkpoint; raises CheckpointError if there is none that fits."""
        state = checkpoint.load(self.options.checkpoint, self.settings())
        if state["vocabulary"] != self.vocabulary.words:
            raise checkpoint.CheckpointError(
                f"resume: {self.options.checkpoint} is of another text: the words differ"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        checkpoint.set_random_state(state["random"], self.options.device)
        self.epoch = state["epoch"]
        self.losses = state["losses"]
        self.validation = state["validation"]
        self.best, self.best_weights = state["best"], state["best_weights"]

    def step(self, words: Tensor, targets: Tensor) -> float:
        """Train on one batch; returns its loss."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.compiled(words).flatten(0, 1), targets)
        value = loss.item()
        check_loss(value, len(self.losses) + 1, self.schedule.get_last_lr()[0])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        return value

    def finished(self) -> bool:
        """Say whether all epochs, or all steps that were asked for, are done."""
        max_steps = self.options.max_steps
        return self.epoch >= self.options.epochs or bool(
            max_steps and len(self.losses) >= max_steps
        )

    def train_epoch(self) -> None:
        """Train on the whole text, or until --max-steps; then validate, and save if whole."""
        self.compiled.train()
        parts = list(batches(self.text.train, self.options.bptt))
        first = len(self.losses)
        num_words, seconds = 0, 0.0
        last_line = time.perf_counter()
        with tqdm(parts, desc=f"epoch {self.epoch + 1}", leave=False, disable=None) as bar:
            for words, targets in bar:
                self.interrupt.check()
                start = time.perf_counter()
                loss = self.step(words, targets)
                self.step_seconds.append(time.perf_counter() - start)
                self.losses.append(loss)
                # The first step compiles; a speed with it says little.
                if len(self.step_seconds) > 1:
                    num_words += len(targets)
                    seconds += self.step_seconds[-1]
                    bar.set_postfix_str(
                        f"loss {loss:.3f}, {num_words / seconds:,.0f} tokens/s", refresh=False
                    )
                if bar.disable and time.perf_counter() - last_line >= SECONDS_BETWEEN_LINES:
                    last_line = time.perf_counter()
                    done = len(self.losses) - first
                    speed = f", {num_words / seconds:,.0f} tokens/s" if seconds else ""
                    print(
                        f"epoch {self.epoch + 1}: step {done:,} of {len(parts):,},"
                        f" loss {loss:.3f}{speed}",
                        flush=True,
                    )
                if self.options.max_steps == len(self.losses):
                    break
        losses = self.losses[first:]
        valid = self.evaluate(self.text.valid)
        self.validation.append((len(self.losses), valid))
        mean = sum(losses) / len(losses)
        print(
            f"epoch {self.epoch + 1}: {len(losses)} steps,"
            f" loss {mean:.3f} (perplexity {perplexity(mean):.1f}),"
            f" validation {valid:.3f} (perplexity {perplexity(valid):.1f})"
            + (f", {num_words / seconds:,.0f} tokens/s" if seconds else ""),
            flush=True,
        )
        if valid < self.best:
            self.best, self.best_weights = valid, self.weights()
        if len(losses) == len(parts):
            self.epoch += 1
            self.schedule.step()
            self.save()

    @torch.no_grad()
    def evaluate(self, text: Tensor) -> float:
        """Return the mean loss per word."""
        self.compiled.eval()
        total = 0.0
        for words, targets in batches(text, self.options.bptt):
            self.interrupt.check()
            loss = nn.functional.cross_entropy(self.compiled(words).flatten(0, 1), targets)
            total += len(targets) * loss.item()
        return total / text[1:].numel()

    def write(self, **more: Any) -> None:
        """Write the losses and the picture, where asked for."""
        options = self.options
        record = {"backend": options.backend, "losses": self.losses, "validation": self.validation}
        if options.losses:
            options.losses.write_text(json.dumps(record | more))
        if options.plot:
            title = f"Transformer language model, backend {options.backend}"
            loss_curve.plot(options.plot, title, self.losses, self.validation)
            print(f"loss curve: {options.plot}")

    def kept(self) -> str:
        """Say which checkpoint there is to go on from."""
        if not self.checkpointed:
            return "this run has no checkpoint yet: the first comes with the end of an epoch"
        return f"epoch {self.epoch} is in {self.options.checkpoint}: go on with --resume"


def train(training: Training) -> None:
    """Train to the end, test the best weights and print the figures."""
    options = training.options
    print(
        f"{training.text.train.numel():,} words of training text,"
        f" {len(training.vocabulary):,} in the vocabulary,"
        f" {sum(p.numel() for p in training.model.parameters()):,} parameters,"
        f" backend {options.backend}, device {options.device}",
        flush=True,
    )
    if training.epoch:
        print(f"resumed after epoch {training.epoch} from {options.checkpoint}")
    if training.finished():
        print("nothing left to train: ask for more with --epochs or --max-steps")
    while not training.finished():
        training.train_epoch()

    training.model.load_state_dict(training.best_weights)
    test = training.evaluate(training.text.test)
    print(f"test: loss {test:.3f}, perplexity {perplexity(test):.2f}")
    print_step_times(training.step_seconds, options.backend)
    print(f"peak memory {peak_memory_mib(options.device):,.0f} MiB")
    print_counters(options.backend)
    training.write(test=test, perplexity=perplexity(test))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser, options = parse(argv)
    torch.manual_seed(options.seed)
    with Interrupt() as interrupt:
        return run(parser, options, interrupt)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace, interrupt: Interrupt) -> int:
    """Train as the options say; returns the exit status."""
    try:
        training = Training(options, Splits(*map(tokenize, read_splits(options.data))), interrupt)
        if options.resume:
            training.resume()
    except (TextError, checkpoint.CheckpointError) as error:
        parser.error(str(error))
    try:
        train(training)
    except LossError as error:
        training.write()
        stop(parser, f"{error}; {training.kept()}")
    except KeyboardInterrupt:
        print(f"interrupted at step {len(training.losses) + 1}; {training.kept()}")
        training.write()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
