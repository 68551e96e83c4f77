"""A run of a file, beside onnxruntime where that is installed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_ort import _C
from torch_ort.core.dtypes import dtype_of_number
from torch_ort.onnx.graphs import inputs_of
from torch_ort.onnx.load import load_onnx

_REPETITIONS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--inputs", type=Path, metavar="NPZ", help="arrays by names of inputs")
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N",
        help="a size that the file names, for random inputs; 2 otherwise",
    )  # fmt: skip
    parser.add_argument("--backend", choices=["eager", "ort"], default="ort")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="greatest difference")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """Run a file on inputs, given or random, beside onnxruntime; 1 if the results differ."""
    console = Console()
    torch.manual_seed(options.seed)
    inputs = given_inputs(options.file, options.inputs, sizes_of(options.size))
    loaded = load_onnx(options.file, trainable=False)
    call = loaded if options.backend == "eager" else torch.compile(loaded, backend="ort")
    with torch.no_grad():
        results, seconds = _timed(lambda: call(*inputs.values()))
    mine = results if isinstance(results, tuple) else (results,)
    theirs, their_seconds = by_onnxruntime(options.file, inputs)
    table = Table("output", "dtype", "sizes", "greatest difference")
    names = [value.name for value in onnx.load(options.file, load_external_data=False).graph.output]
    differs = False
    for i, (name, result) in enumerate(zip(names, mine, strict=True)):
        words = "onnxruntime is not installed"
        if theirs is not None:
            difference = greatest_difference(result, theirs[i])
            differs |= not difference <= options.tolerance
            words = f"{difference:.3g}"
        sizes = " x ".join(map(str, result.shape))
        table.add_row(escape(name), str(result.dtype).removeprefix("torch."), sizes, words)
    console.print(table)
    console.print(f"{options.backend}: {1000 * seconds:.3f} ms a call")
    if their_seconds is not None:
        console.print(f"onnxruntime: {1000 * their_seconds:.3f} ms a call")
    return int(differs)


def sizes_of(given: list[str]) -> dict[str, int]:
    """Read sizes of the form NAME=N. Raises UserError for others."""
    sizes = {}
    for each in given:
        name, _, number = each.partition("=")
        if not number.isdecimal():
            raise _C.UserError(f"--size: got {each}, want NAME=N")
        sizes[name] = int(number)
    return sizes


def given_inputs(
    path: Path, arrays: Path | None, sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Give tensors for the inputs of a file: those of an archive, and random ones for the rest.

    Random integers are 0 or 1. Raises UserError for an array that is no input.
    """
    graph = onnx.load(path, load_external_data=False).graph
    values = inputs_of(graph)
    found: dict[str, np.ndarray] = {}
    if arrays is not None:
        with np.load(arrays, allow_pickle=False) as archive:
            found = dict(archive)
    unknown = sorted(found.keys() - {value.name for value in values})
    if unknown:
        there = ", ".join(value.name for value in values)
        raise _C.UserError(f"{arrays}: got {', '.join(unknown)}, want some of {there}")
    return {
        value.name: torch.from_numpy(found[value.name]) if value.name in found
        else _random(value, sizes)
        for value in values
    }  # fmt: skip


def _random(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> torch.Tensor:
    tensor = value.type.tensor_type
    shape = [
        dim.dim_value if dim.HasField("dim_value") else sizes.get(dim.dim_param, 2)
        for dim in tensor.shape.dim
    ]
    dtype = dtype_of_number(tensor.elem_type)
    if dtype is None:
        raise _C.UserError(f"input '{value.name}': got no tensor of numbers, want one of --inputs")
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 2, shape).to(dtype)


def by_onnxruntime(
    path: Path, inputs: Mapping[str, torch.Tensor]
) -> tuple[list[Any] | None, float | None]:
    """Give the results of onnxruntime and the seconds of a call; None where it is missing."""
    try:
        import onnxruntime
    except ImportError:
        return None, None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    arrays = {name: x.numpy() for name, x in inputs.items()}
    return _timed(lambda: session.run(None, arrays))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Give the result of a call, and the seconds of the fastest of some more."""
    result, times = call(), []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return result, min(times)


def greatest_difference(mine: torch.Tensor, theirs: np.ndarray) -> float:
    """Give the greatest difference of two results; infinity where their sizes differ."""
    other = torch.from_numpy(np.ascontiguousarray(theirs)).double()
    if other.shape != mine.shape:
        return float("inf")
    far = (mine.double() - other).abs()
    far = far.masked_fill((mine.double() == other) | (mine.isnan() & other.isnan()), 0)
    return float(far.max()) if far.numel() else 0.0
