"""Train a classifier of padded texts, and see what leaving out rows saves.

A model like BERT reads made-up texts of two topics, which are padded to one length, and tells
them apart by their first place. So nobody reads the rows of padding, nor most rows of the last
block: the engine leaves them out. The program prints how dense the input is, which rows are left
out where, and the time and memory of a step in eager PyTorch, in the engine without `row_sparsity`,
and with it; each is measured in a process of its own.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from command_line import Parser, check_loss, positive, print_counters, run, whole
from loss_curve import check_format
from torch import Tensor, nn
from torch.nn import functional

import torch_ort

PADDING, FIRST, NUM_SPECIAL = 0, 1, 2  # ids; words come after them
NUM_TOPICS = 2
LR = 3e-4
WAYS = {
    "eager": None,
    "all rows": {"enable_sparse_optimizer": False},
    "rows that count": {},
}  # options of the engine


class Block(nn.Module):
    """Self-attention and a feed-forward network, each before a norm, as BERT has them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Map hidden [batch, length, width]; mask [batch, 1, 1, length] is true for words."""
        batch, length, width = hidden.shape
        packed = self.project_in(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask)
        mixed = self.project_out(mixed.transpose(1, 2).flatten(2))
        hidden = self.norms[0](hidden + self.dropout(mixed))
        return self.norms[1](hidden + self.dropout(self.feed(hidden)))


class Classifier(nn.Module):
    """Tells the topic of a text by what the blocks make of its first place."""

    def __init__(self, vocabulary: int, width: int, heads: int, blocks: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.places = nn.Parameter(torch.randn(length, width) / 50)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads, 0.1) for _ in range(blocks))
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(width, NUM_TOPICS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of int64 input_ids [batch, length] against int64 labels [batch]."""
        mask = (input_ids != PADDING)[:, None, None]
        hidden = self.dropout(self.norm(self.words(input_ids) + self.places))
        for block in self.blocks:
            hidden = block(hidden, mask)
        return functional.cross_entropy(self.head(self.pooler(hidden[:, 0])), labels)


def make_batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return texts, of words that two thirds of the time are of their topic, and the topics."""
    shape = (options.batch_size, options.length)
    topics = torch.randint(NUM_TOPICS, shape[:1])
    num_words = options.vocabulary - NUM_SPECIAL
    words = NUM_SPECIAL + torch.randint(num_words, shape)
    of_topic = NUM_SPECIAL + topics[:, None] + NUM_TOPICS * torch.randint(num_words // 2, shape)
    ids = torch.where(torch.rand(shape) < 1 / 3, of_topic, words)
    ids[:, 0] = FIRST
    twice = round(2 * options.density * options.length)  # lengths around half of that
    longest = min(options.length, max(1, twice - 1))
    lengths = torch.randint(max(1, twice - longest), longest + 1, shape[:1])
    return ids.masked_fill(torch.arange(shape[1]) >= lengths[:, None], PADDING), topics


def batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the same batches for all ways, without end."""
    torch.manual_seed(options.seed)
    made = [make_batch(options) for _ in range(8)]
    while True:
        yield from made


def make_model(options: argparse.Namespace) -> Classifier:
    """Return the same model for all ways."""
    torch.manual_seed(options.seed)
    return Classifier(
        options.vocabulary, options.width, options.heads, options.blocks, options.length
    )


@dataclass(frozen=True)
class Measured:
    """What training has taken: a median step, the most MiB beyond the model, and the last loss."""

    seconds: float
    mib: float
    loss: float


def measure(options: argparse.Namespace, way: str) -> Measured:
    """Train for some steps in one of the WAYS."""
    torch.set_num_threads(options.threads)
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    settings = WAYS[way]
    step = model if settings is None else torch.compile(model, backend="ort", options=settings)
    # What libraries load with the first graph counts for no way.
    torch.compile(torch.nn.Linear(1, 1), backend="ort")(torch.ones(1, 1))
    before, seconds, losses = resident_mib(), [], []
    for _, batch in zip(range(options.steps), batches(options), strict=False):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        check_loss(losses[-1], len(losses), LR)
        if len(losses) == 1:  # it compiles
            seconds.clear()
            forget_peak()
    return Measured(statistics.median(seconds), resident_mib(peak=True) - before, losses[-1])


def resident_mib(peak: bool = False) -> float:
    """Return the memory that this process holds, or the most since `forget_peak`."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10


def forget_peak() -> None:
    """Let the peak of the memory held start anew; of this process alone."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def show_density(options: argparse.Namespace) -> None:
    """Let five steps print the density of their two inputs: ten rows, one table."""
    model = make_model(options)
    step = torch.compile(model, backend="ort", options={"print_input_density": True})
    for _, batch in zip(range(5), batches(options), strict=False):
        step(*batch).backward()


def show_rows(options: argparse.Namespace) -> None:
    """Print which rows the engine computes, and where."""
    report = torch_ort.explain(make_model(options), *next(batches(options)))
    for graph in report.graphs:
        print(graph.rows_text())


def compare(options: argparse.Namespace) -> None:
    """Print what is left out, and what that saves; draw it if a file is named."""
    show_density(options)
    show_rows(options)
    print_counters("ort")
    found = {}
    for way in WAYS:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found[way] = pool.submit(measure, options, way).result()
        each = found[way]
        print(
            f"{way:16} {1e3 * each.seconds:8.1f} ms a step, {each.mib:8.1f} MiB beyond the model, "
            f"loss {each.loss:.4f} after {options.steps} steps"
        )
    dense, sparse = found["all rows"], found["rows that count"]
    print(
        f"where rows are left out a step takes {sparse.seconds / dense.seconds:.2f} of the time "
        f"and {sparse.mib / dense.mib:.2f} of the memory"
    )
    if options.plot is not None:
        plot(options.plot, found)


def plot(path: Path, found: dict[str, Measured]) -> None:
    """Draw time and memory of each way beside each other."""
    # Figure, not pyplot: no window system is asked for, and nothing global changes.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = {
        "ms a step": [1e3 * each.seconds for each in found.values()],
        "MiB beyond the model": [each.mib for each in found.values()],
    }
    for axes, (label, numbers) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        bars = axes.bar([*found], numbers, color=["tab:gray", "tab:blue", "tab:orange"])
        axes.bar_label(bars, fmt="{:.0f}")
        axes.set(ylabel=label)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=whole(2), default=20, help="training steps of each way")
    parser.add_argument("--density", type=positive, default=0.3, help="part of places with a word")
    parser.add_argument("--batch-size", type=whole(1), default=32, help="texts in a step")
    parser.add_argument("--length", type=whole(2), default=128, help="places of a text")
    parser.add_argument("--vocabulary", type=whole(8), default=30522, help="words there are")
    parser.add_argument("--width", type=whole(1), default=256, help="width of the model")
    parser.add_argument("--heads", type=whole(1), default=4, help="heads of attention")
    parser.add_argument("--blocks", type=whole(1), default=4, help="blocks of the model")
    parser.add_argument("--threads", type=whole(1), default=torch.get_num_threads(), help="threads")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of all random numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time and memory")
    options = parser.parse_args(argv)
    if options.density > 1:
        parser.error(f"--density: got {options.density:g}, want at most 1")
    if options.width % options.heads:
        parser.error(f"--width: got {options.width}, want a multiple of {options.heads} heads")
    if options.plot is not None:
        try:
            check_format(options.plot)
        except ValueError as error:
            parser.error(str(error))
        if not options.plot.resolve().parent.is_dir():
            parser.error(f"--plot: no such folder: {options.plot.resolve().parent}")
    return run(parser, lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
