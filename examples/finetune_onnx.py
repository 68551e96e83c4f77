"""Fine-tune an ONNX file: a network that reads digits learns to read them in negative."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from command_line import Parser, compile_model, positive, print_counters, run, whole
from torch import Tensor, nn
from train_digits import DigitNet, accuracy, load, train_epoch

import torch_ort


def make_file(path: Path, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train a network in eager PyTorch, and export it as it evaluates."""
    model = DigitNet()
    train_epochs(model, model, images, labels, epochs, lr=2e-3)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of this exporter, which needs no more
        torch.onnx.export(
            model, (images[:2],), path, dynamo=False, input_names=["images"],
            output_names=["logits"], dynamic_axes={"images": {0: "batch"}},
        )  # fmt: skip


def train_epochs(
    model: nn.Module, called: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float
) -> list[float]:
    """Train the parameters of `model` through what is called, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses: list[float] = []
    for _ in range(epochs):
        batches = [(images[i], labels[i]) for i in torch.randperm(len(labels)).split(64)]
        train_epoch(called, optimizer, batches, losses, [])
    return losses


def by_onnxruntime(path: Path, images: Tensor, labels: Tensor) -> float | None:
    """Return the accuracy of a file in onnxruntime, or None where that is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": images.numpy()})
    return (torch.from_numpy(logits).argmax(dim=1) == labels).float().mean().item()


def finetune(options: argparse.Namespace) -> None:
    """Make a file, load it, train on negatives, and write it again."""
    torch.manual_seed(options.seed)
    train_images, train_labels, test_images, test_labels = load("cpu")
    make_file(options.file, train_images, train_labels, options.epochs)
    print(f"{options.file}: accuracy {accuracy_of(options.file, test_images, test_labels):.2%}")

    loaded = torch_ort.load_onnx(options.file, trainable=options.trainable)
    count = sum(parameter.numel() for parameter in loaded.parameters())
    print(f"in negative: accuracy {accuracy(loaded, 1 - test_images, test_labels):.2%}")
    print(f"training {count:,} numbers of {', '.join(n for n, _ in loaded.named_parameters())}")
    compiled = compile_model(loaded, options.backend)
    losses = train_epochs(
        loaded, compiled, 1 - train_images, train_labels, options.epochs, options.lr
    )
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")

    torch_ort.export_onnx(loaded, options.output)
    found = accuracy(loaded, 1 - test_images, test_labels)
    print(f"{options.output}: in negative, accuracy {found:.2%}")
    other = by_onnxruntime(options.output, 1 - test_images, test_labels)
    if other is not None:
        print(f"in onnxruntime: accuracy {other:.2%}")
    print_counters(options.backend)


def accuracy_of(path: Path, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy of a file."""
    return accuracy(torch_ort.load_onnx(path, trainable=False), images, labels)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--file", type=Path, default=Path("digits.onnx"), help="is made first")
    parser.add_argument("--output", type=Path, default=Path("negatives.onnx"), help="is written")
    parser.add_argument("--trainable", default="*", help="a pattern of names, such as classifier.*")
    parser.add_argument("--backend", choices=("ort", "eager"), default="ort", help="who trains")
    parser.add_argument("--epochs", type=whole(1), default=5, help="for the file, and once more")
    parser.add_argument("--lr", type=positive, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    options = parser.parse_args(argv)
    return run(parser, lambda: finetune(options))


if __name__ == "__main__":
    sys.exit(main())
