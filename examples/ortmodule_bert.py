"""Train a small BERT through ORTModule to tell which play a line comes from, beside eager.

It is made from a configuration (4 layers, width 128), with a vocabulary learned from the lines;
`--model` takes a BERT folder of Hugging Face's instead, to be fine-tuned.
"""

import argparse
import copy
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from command_line import Parser, check_loss, positive, print_counters, run, whole
from tokenizers import BertWordPieceTokenizer
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    PreTrainedTokenizerBase,
)

from torch_ort import ORTModule

PLAYS = Path(__file__).parent / "data" / "plays"
SHORTEST = 25  # characters of a line; shorter ones say little
VOCABULARY = 8000  # pieces of words

Batch = dict[str, Tensor]


def load_model(
    folder: Path | None, lines: Sequence[tuple[str, int]], num_labels: int
) -> tuple[PreTrainedTokenizerBase, nn.Module]:
    """Return a tokenizer and a classifier: those of a folder, or new ones for these lines."""
    if folder is not None:
        return (
            AutoTokenizer.from_pretrained(folder),
            BertForSequenceClassification.from_pretrained(folder, num_labels=num_labels),
        )
    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator(
        (text for text, _ in lines), vocab_size=VOCABULARY, show_progress=False
    )
    config = BertConfig(
        vocab_size=pieces.get_vocab_size(), hidden_size=128, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=512, num_labels=num_labels,
    )  # fmt: skip
    tokenizer = BertTokenizerFast(tokenizer_object=pieces)
    return tokenizer, BertForSequenceClassification(config)


def read_lines(folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the titles of the plays, and lines with the number of their play."""
    files = sorted(folder.glob("*.txt"))
    lines = [
        (line.strip(), number)
        for number, file in enumerate(files)
        for line in file.read_text(encoding="utf-8").splitlines()
        if len(line.strip()) >= SHORTEST
    ]
    return [file.stem for file in files], lines


def make_batch(
    tokenizer: PreTrainedTokenizerBase, lines: Sequence[tuple[str, int]], device: str
) -> Batch:
    """Return a batch padded to its longest line, with labels."""
    batch = tokenizer([text for text, _ in lines], padding=True, return_tensors="pt")
    batch["labels"] = torch.tensor([number for _, number in lines])
    return {name: tensor.to(device) for name, tensor in batch.items()}


def batches(
    lines: Sequence[tuple[str, int]], size: int, make: Callable[..., Batch], seed: int
) -> Iterator[Batch]:
    """Give batches of shuffled lines without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(lines), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield make([lines[i] for i in order[start : start + size]])


def train(model: nn.Module, feed: Iterator[Batch], options: argparse.Namespace) -> list[float]:
    """Train for some steps; return their losses. Prints the first step's time and the median."""
    torch.manual_seed(options.seed)  # of dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses, seconds = [], []
    model.train()
    for batch in itertools.islice(feed, options.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(**batch).loss
        value = loss.item()
        check_loss(value, len(losses) + 1, options.lr)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(value)
    print(f"  first step {seconds[0]:.2f} s, median {1e3 * statistics.median(seconds):.0f} ms")
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, given: Sequence[Batch]) -> float:
    """Return the share of lines whose play the model names rightly."""
    model.eval()
    right = total = 0
    for batch in given:
        named = model(**batch).logits.argmax(dim=1)
        right += (named == batch["labels"]).sum().item()
        total += len(named)
    return right / total


def compare(options: argparse.Namespace) -> None:
    """Train one copy in plain PyTorch and one through ORTModule; print both accuracies."""
    plays, lines = read_lines(PLAYS)
    random.Random(0).shuffle(lines)  # the same lines are for testing, whatever the seed
    test, kept = lines[: len(lines) // 20], lines[len(lines) // 20 :]
    torch.manual_seed(options.seed)
    tokenizer, plain = load_model(options.model, kept, len(plays))
    plain.to(options.device)
    ours = ORTModule(copy.deepcopy(plain))
    print(f"{len(kept):,} lines of {len(plays)} plays to train on, {len(test):,} to test")

    def make(chosen: Sequence[tuple[str, int]]) -> Batch:
        return make_batch(tokenizer, chosen, options.device)

    asked = [make(test[i : i + 64]) for i in range(0, min(len(test), options.test_lines), 64)]
    results = {}
    for name, model in (("eager", plain), ("ORTModule", ours)):
        print(f"{name}: training for {options.steps} steps")
        feed = batches(kept, options.batch_size, make, options.seed)
        losses = train(model, feed, options)
        results[name] = accuracy(model, asked)
        last = statistics.mean(losses[-10:])
        print(f"  loss {losses[0]:.4f} to {last:.4f}, test accuracy {results[name]:.2%}")
    difference = 100 * (results["ORTModule"] - results["eager"])
    print(f"accuracy: ORTModule {results['ORTModule']:.2%}, eager {results['eager']:.2%} "
          f"({difference:+.2f} points)")  # fmt: skip
    print_counters("ort")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a BERT")
    parser.add_argument("--device", default="cpu", help="where it runs, such as cpu or cuda")
    parser.add_argument("--steps", type=whole(1), default=400, help="training steps of each")
    parser.add_argument("--batch-size", type=whole(1), default=32, help="lines in a step")
    parser.add_argument("--test-lines", type=whole(1), default=1024, help="lines to test on")
    parser.add_argument("--lr", type=positive, default=5e-4, help="learning rate of AdamW")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of all random numbers")
    options = parser.parse_args(argv)
    if options.model is not None and not options.model.is_dir():
        parser.error(f"--model: no such folder: {options.model}")
    return run(parser, lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
