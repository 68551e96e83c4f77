"""Fine-tuning of a file on batches that stand in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.load import OnnxModule, load_onnx
from torch_ort.onnx.save import export_onnx

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
}
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "data", type=Path, help="a folder of .npz files, a batch each: arrays by names of inputs"
    )
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument(
        "--loss", choices=[*LOSSES, "output"], default="cross_entropy",
        help="of an output and a target; or the output itself",
    )  # fmt: skip
    parser.add_argument("--target", default="target", help="name of the array with the targets")
    parser.add_argument("--output", type=int, default=0, help="which output of the model is meant")
    parser.add_argument("--trainable", nargs="*", metavar="PATTERN", help="weights to be trained")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw")
    parser.add_argument("--backend", choices=["eager", "ort"], default="ort")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="where to draw the losses")
    parser.add_argument("--seed", type=int, default=0, help="of the order of batches")


def run(options: argparse.Namespace) -> int:
    """Train a file on the batches of a folder, and write it again."""
    console = Console()
    batches = sorted(options.data.glob("*.npz"))
    if not batches:
        raise _C.UserError(f"{options.data}: got no .npz files, want one or more")
    loaded = load_onnx(options.file, True if options.trainable is None else options.trainable)
    call = loaded if options.backend == "eager" else torch.compile(loaded, backend="ort")
    loaded.train()  # dropout drops, and statistics of batch norms move
    losses = []
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=options.epochs * len(batches))
        for loss in _steps(loaded, call, batches, options):
            losses.append(loss)
            progress.update(task, advance=1, description=f"loss {loss:.4g}")
    export_onnx(loaded.eval(), options.write)
    if losses:
        console.print(f"loss {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps")
    console.print(f"wrote {options.write}", markup=False)
    if options.plot:
        _plot(losses, options.plot)
    return 0


def _steps(
    loaded: OnnxModule,
    call: Callable[..., object],
    batches: list[Path],
    options: argparse.Namespace,
) -> Iterator[float]:
    """Train; gives the loss of each step."""
    optimizer = _OPTIMIZERS[options.optimizer](loaded.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)  # of dropout
    for _ in range(options.epochs):
        for i in torch.randperm(len(batches), generator=generator).tolist():
            loss = _loss(call, batches[i], options)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


def _loss(call: Callable[..., object], batch: Path, options: argparse.Namespace) -> Tensor:
    with np.load(batch, allow_pickle=False) as archive:
        arrays = {name: torch.from_numpy(array) for name, array in archive.items()}
    target = arrays.pop(options.target, None)
    given = call(**arrays)
    outputs = given if isinstance(given, tuple) else (given,)
    if not 0 <= options.output < len(outputs):
        raise _C.UserError(f"--output: got {options.output}, want less than {len(outputs)}")
    result = outputs[options.output]
    if options.loss == "output":
        return result.mean()
    if target is None:
        raise _C.UserError(f"{batch}: got no array '{options.target}', want targets")
    return LOSSES[options.loss](result, target)


def _plot(losses: list[float], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _C.UserError("--plot: matplotlib is not installed") from error
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    figure.savefig(path, bbox_inches="tight")
