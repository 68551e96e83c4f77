"""Writes a described model as an ONNX file, with the names of its description."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from torch_ort.onnx.capture import captured_model, name_sizes, name_values
from torch_ort.onnx.weights import save
from torch_ort.ortmodule import ORTModule

# The names that an ORTModule gives to the tensors of its first argument, here the tuple of inputs.
_GIVEN = re.compile(r"^\[0\]\[(\d+)\](.*)$")
_OF_MODEL = "model."


def write(
    path: str | os.PathLike[str],
    module: torch.nn.Module,
    run: Callable[[ORTModule], Any],
    inputs: Sequence[str],
    shapes: Sequence[Sequence[int | str]],
    outputs: Sequence[str],
    opset: int,
) -> None:
    """Write the graph that `run(ORTModule(module))` captures.

    `shapes` are those of the inputs as they are described: sizes that vary get the names there.
    An input that the graph does not read is not in the file. Raises RuntimeError where the module
    cannot be captured.
    """
    model = captured_model(module, run, {"opset": opset})
    if model is None:
        raise RuntimeError(
            "save_as_onnx: the model runs in eager PyTorch, want one that can be captured"
        )
    name_sizes(model.graph, _described_sizes(model.graph, shapes))
    name_values(model.graph, _described_values(model.graph, inputs), list(outputs))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(model, path)


def _described_sizes(
    graph: onnx.GraphProto, shapes: Sequence[Sequence[int | str]]
) -> dict[str, str]:
    """Give the names that the description has for sizes that vary."""
    wanted: dict[str, str] = {}
    for value in graph.input:
        match = _GIVEN.match(value.name)
        if match is None or match[2]:  # it belongs to the model, or is a part of an input
            continue
        dims, shape = value.type.tensor_type.shape.dim, shapes[int(match[1])]
        if len(dims) != len(shape):  # a warning has said that the description does not fit
            continue
        for dim, described in zip(dims, shape, strict=True):
            if dim.dim_param.isidentifier() and isinstance(described, str):
                wanted.setdefault(dim.dim_param, described)
    return wanted


def _described_values(graph: onnx.GraphProto, inputs: Sequence[str]) -> dict[str, str]:
    """Give names of inputs as described, and of weights as the model has them."""
    wanted = {}
    for value in graph.input:
        match = _GIVEN.match(value.name)
        if match is not None:
            wanted[value.name] = inputs[int(match[1])] + re.sub(r"\W+", "_", match[2]).rstrip("_")
    for value in graph.initializer:
        if value.name.startswith(_OF_MODEL):
            wanted[value.name] = value.name.removeprefix(_OF_MODEL)
    return wanted
