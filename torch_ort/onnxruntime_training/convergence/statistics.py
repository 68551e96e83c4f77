"""Statistics of tensors, and the subscriber that writes them to text files."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch

from torch_ort.onnxruntime_training.convergence.subscription import SubscriberBase

NUM_VALUES = 128  # written of each tensor
ORDER = "order.txt"
_MAX_FILE_NAME = 200  # file systems allow 255
_NAN = math.nan


@dataclass
class Statistics:
    """Statistics of the elements of one tensor; complex elements count as two numbers each.

    `std` is the standard deviation of the elements themselves (divided by their number, not by one
    less), so that of one element is 0. The last five fields count elements.
    """

    min: float = _NAN
    max: float = _NAN
    mean: float = _NAN
    std: float = _NAN
    nan: int = 0
    inf: int = 0
    zero: int = 0
    negative: int = 0
    positive: int = 0


def statistics_of(tensor: torch.Tensor, bucket_size: int) -> Statistics:
    """Compute statistics, `bucket_size` numbers at a time."""
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = numbers.reshape(-1)
    if not flat.numel():
        return Statistics()
    rows = [_bucket_row(bucket) for bucket in flat.split(bucket_size)]
    lows, highs, sums, *counts = zip(*rows, strict=True)
    mean = sum(sums) / flat.numel()
    # In a second pass, because a difference of sums of squares loses its digits if the mean is
    # large.
    squares = sum((b.double() - mean).square().sum().item() for b in flat.split(bucket_size))
    std = math.sqrt(squares / flat.numel())
    return Statistics(
        _extreme(min, lows), _extreme(max, highs), mean, std, *(int(sum(c)) for c in counts)
    )


def _bucket_row(bucket: torch.Tensor) -> list[float]:
    """Give smallest and largest number, sum, and counts, with one transfer from the device."""
    wide = bucket.double()
    row = [wide.min(), wide.max(), wide.sum()]
    row += [wide.isnan().sum(), wide.isinf().sum()]
    row += [(wide == 0).sum(), (wide < 0).sum(), (wide > 0).sum()]
    return torch.stack([number.double() for number in row]).tolist()


def _extreme(choose: type[min] | type[max], numbers: tuple[float, ...]) -> float:
    return _NAN if any(map(math.isnan, numbers)) else choose(numbers)


class StatisticsSubscriber(SubscriberBase):
    """Writes statistics of each activation and gradient into text files.

    The files are `step_N/<Class>_<index>_<output>th_output_forward` and `..._backward`, as those of
    ONNX Runtime Training; `step_N/order.txt` lists them in the order in which they were written,
    each with the path of the activation. The command
    `python -m torch_ort.convergence.merge_activation_summary` compares the files of two runs.

    Args:
        output_dir: The folder of the files.
        start_step: The first step to write; None: step 0.
        end_step: The step before which to stop; None: never.
        override_output_dir: Remove the steps that are in an existing folder.
        run_on_cpu: Copy tensors to the CPU before their statistics are computed.
        bucket_size: The number of elements that are processed at once.

    Raises FileExistsError if `output_dir` exists and `override_output_dir` is False, and ValueError
    if `bucket_size` is less than 1.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 1 << 29,
    ) -> None:
        super().__init__(start_step, end_step)
        if bucket_size < 1:
            raise ValueError(f"bucket_size: got {bucket_size}, want at least 1")
        self._folder = Path(output_dir)
        self._run_on_cpu = run_on_cpu
        self._bucket_size = bucket_size
        self._written: Counter[int] = Counter()  # files by step
        self._ort_names: dict[str, str] = {}
        if self._folder.exists() and not override_output_dir:
            raise FileExistsError(
                f"output_dir: '{self._folder}' exists; pass override_output_dir=True to replace it"
            )
        for old in self._folder.glob("step_*"):
            shutil.rmtree(old)
        self._folder.mkdir(parents=True, exist_ok=True)

    def name_in_ort(self, name: str, ort_name: str) -> None:
        """Learn by which name the files of an activation are known."""
        self._ort_names[name] = ort_name

    def forward_activation(self, name: str, tensor: torch.Tensor, step: int, depth: int) -> None:
        """Write the file of an activation."""
        self._write(name, "forward", tensor, step, depth)

    def backward_gradient(self, name: str, gradient: torch.Tensor, step: int, depth: int) -> None:
        """Write the file of a gradient."""
        self._write(name, "backward", gradient, step, depth)

    def _write(
        self, name: str, direction: str, tensor: torch.Tensor, step: int, depth: int
    ) -> None:
        tensor = tensor.cpu() if self._run_on_cpu else tensor
        path = " ".join(name.splitlines())
        lines = [
            f"activation: {path}",
            f"direction: {direction}",
            f"order: {self._written[step]}",
            f"depth: {depth}",
            f"shape: {list(tensor.shape)}",
            f"dtype: {tensor.dtype}",
            *_lines_of(tensor, self._bucket_size),
        ]
        self._written[step] += 1
        folder = self._folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(lines) + "\n"
        file = folder / f"{file_name(self._ort_names.get(name, name))}_{direction}"
        file.write_text(text, encoding="utf-8")
        with (folder / ORDER).open("a", encoding="utf-8") as order:
            order.write(f"{file.name}\t{path}\n")


def _lines_of(tensor: torch.Tensor, bucket_size: int) -> Iterator[str]:
    for key, value in vars(statistics_of(tensor, bucket_size)).items():
        yield f"{key}: {value}"
    values = tensor.reshape(-1)[:NUM_VALUES].tolist()
    yield f"values: {', '.join(map(str, values))}"


def file_name(name: str) -> str:
    """Make a name fit for a file; no two names become the same one."""
    quoted = quote(name, safe="@")
    if len(quoted) <= _MAX_FILE_NAME:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{quoted[:_MAX_FILE_NAME]}~{digest}"
