"""Train a scripted network on handwritten digits: in TorchScript's interpreter, then in the engine.

What is trained is the script: it is saved at the end, loaded as a server would, and tested.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from command_line import Parser, check_loss, positive, print_counters, run, whole
from torch import Tensor, nn
from train_digits import load

import torch_ort


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float [batch, width, h, w] to the same."""
        inner = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(inner)))


class Net(nn.Module):
    """A residual network that gives the loss where it is told the digits."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, digits: Tensor | None = None) -> Tensor:
        """Map float [batch, 1, 8, 8] to logits, float [batch, 10], or to the mean loss."""
        if images.dim() != 4:
            raise ValueError(f"want images of four dims, got {images.dim()}")
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        if digits is None:
            return logits
        return nn.functional.cross_entropy(logits, digits)


def train(
    model: nn.Module, data: tuple[Tensor, Tensor], options: argparse.Namespace
) -> tuple[list[float], float]:
    """Train; return all losses and the median time of a step in seconds."""
    images, digits = data
    torch.manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    seconds: list[float] = []
    for _ in range(options.epochs):
        for rows in torch.randperm(len(images)).split(options.batch_size):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = model(images[rows], digits[rows])
            value = loss.item()
            check_loss(value, len(losses) + 1, options.lr)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            losses.append(value)
    return losses, statistics.median(seconds)


def compare(options: argparse.Namespace) -> None:
    """Train both ways, print what they cost, and test the script that the engine trained."""
    torch.manual_seed(options.seed)
    images, digits, test_images, test_digits = load("cpu")
    net = Net()
    copies = {name: torch.jit.script(copy.deepcopy(net)) for name in ("TorchScript", "engine")}
    for name, scripted in copies.items():
        model = scripted if name == "TorchScript" else torch_ort.compile(scripted)
        losses, seconds = train(model, (images, digits), options)
        print(
            f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f},"
            f" {seconds * 1e3:.1f} ms per step, {len(losses)} steps"
        )
    copies["engine"].eval().save(str(options.output))
    served = torch.jit.load(str(options.output))
    with torch.no_grad():
        right = (served(test_images).argmax(1) == test_digits).float().mean().item()
    print(f"{options.output}: test accuracy {right:.2%}")
    print_counters("ort")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--epochs", type=whole(1), default=3, help="passes over the data")
    parser.add_argument("--batch-size", type=whole(2), default=64, help="images in a step")
    parser.add_argument("--lr", type=positive, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of all random numbers")
    parser.add_argument("--output", type=Path, default=Path("digits.pt"), help="where to save")
    options = parser.parse_args(argv)
    if not options.output.resolve().parent.is_dir():
        parser.error(f"--output: no such folder: {options.output.resolve().parent}")
    return run(parser, lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
