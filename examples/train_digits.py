"""Train a small convolutional network on scikit-learn's handwritten digits, of 8x8 pixels."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from command_line import (
    Parser,
    check_loss,
    compile_model,
    peak_memory_mib,
    positive,
    print_counters,
    print_step_times,
    run,
    whole,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn


class DigitNet(nn.Module):
    """Two convolutions with batch normalization, then a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 4, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map float [batch, 1, 8, 8] to logits, float [batch, 10]."""
        return self.classifier(self.features(images))


def load(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and digits for training, then for testing; every fifth is for testing."""
    digits = load_digits()
    # Pixels go from 0 to 16.
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64, device=device)
    test = torch.arange(len(labels), device=device) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    losses: list[float],
    step_seconds: list[float],
) -> None:
    """Train on each batch once, appending its loss and time."""
    model.train()
    for images, labels in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        value = loss.item()
        check_loss(value, len(losses) + 1, optimizer.param_groups[0]["lr"])
        loss.backward()
        optimizer.step()
        step_seconds.append(time.perf_counter() - start)
        losses.append(value)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model names rightly."""
    model.eval()
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def train(options: argparse.Namespace) -> None:
    """Train, print accuracy after each epoch, and the figures at the end."""
    torch.manual_seed(options.seed)
    train_images, train_labels, test_images, test_labels = load(options.device)
    model = compile_model(DigitNet().to(options.device), options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    step_seconds: list[float] = []
    result = 0.0
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(train_labels)).to(options.device)
        batches = [(train_images[i], train_labels[i]) for i in order.split(options.batch_size)]
        left = len(batches) if options.max_steps is None else options.max_steps - len(losses)
        first = len(losses)
        train_epoch(model, optimizer, batches[:left], losses, step_seconds)
        result = accuracy(model, test_images, test_labels)
        mean = statistics.mean(losses[first:])
        print(f"epoch {epoch}: loss {mean:.4f}, test accuracy {result:.2%}", flush=True)
        if len(losses) == options.max_steps:
            break
    print_step_times(step_seconds, options.backend)
    print(f"peak memory {peak_memory_mib(options.device):,.0f} MiB")
    print_counters(options.backend)
    if options.losses:
        record = {"backend": options.backend, "losses": losses, "accuracy": result}
        options.losses.write_text(json.dumps(record))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_training_options(epochs=10)
    parser.add_argument("--batch-size", type=whole(2), default=64, help="images in a step")
    parser.add_argument("--lr", type=positive, default=2e-3, help="learning rate of AdamW")
    options = parser.parse_args(argv)
    parser.check_training_options(options)
    return run(parser, lambda: train(options))


if __name__ == "__main__":
    sys.exit(main())
