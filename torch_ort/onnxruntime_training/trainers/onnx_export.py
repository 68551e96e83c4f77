"""Writes a described model as an ONNX file, with the names of its description."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from torch_ort.core.log_level import LogLevel
from torch_ort.ortmodule import DebugOptions, ORTModule

# The names that an ORTModule gives to the tensors of its first argument, here the tuple of inputs.
_GIVEN = re.compile(r"^\[0\]\[(\d+)\](.*)$")
_OF_MODEL = "model."
# Above this number of bytes the weights go into a separate file, because a file is limited to 2
# GiB.
_EXTERNAL_LIMIT = 2**30


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
    path = Path(path)
    with tempfile.TemporaryDirectory() as folder:
        prefix = uuid.uuid4().hex
        options = DebugOptions(LogLevel.ERROR, True, prefix, folder, config={"opset": opset})
        try:
            run(ORTModule(module, options))
            found = Path(options.save_path) / f"{prefix}_optimized_inference.onnx"
            if not found.exists():
                raise RuntimeError(
                    "save_as_onnx: the model runs in eager PyTorch, want one that can be captured"
                )
            model = onnx.load(found)
        finally:  # the environment may have chosen another folder
            for file in Path(options.save_path).glob(f"{prefix}_*"):
                file.unlink()
    _name_sizes(model.graph, shapes)
    _name(model.graph, inputs, outputs)
    is_large = model.ByteSize() > _EXTERNAL_LIMIT
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        model,
        path,
        save_as_external_data=is_large,
        location=f"{path.name}.data" if is_large else None,
    )


def _name_sizes(graph: onnx.GraphProto, shapes: Sequence[Sequence[int | str]]) -> None:
    """Call sizes that vary as the description does, in all shapes of the graph."""
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
    if wanted:
        symbols = re.compile(rf"\b({'|'.join(map(re.escape, wanted))})\b")
        _rename_sizes(graph, lambda text: symbols.sub(lambda found: wanted[found[1]], text))


def _rename_sizes(graph: onnx.GraphProto, renamed: Callable[[str], str]) -> None:
    for value in (*graph.input, *graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = renamed(dim.dim_param)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_sizes(attribute.g, renamed)


def _name(graph: onnx.GraphProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs as described, and weights as the model does."""
    wanted = {}
    for value in graph.input:
        match = _GIVEN.match(value.name)
        if match is not None:
            wanted[value.name] = inputs[int(match[1])] + re.sub(r"\W+", "_", match[2]).rstrip("_")
    for value in graph.initializer:
        if value.name.startswith(_OF_MODEL):
            wanted[value.name] = value.name.removeprefix(_OF_MODEL)
    taken = {*wanted.values(), *outputs}
    inner = (name for node in graph.node for name in node.output)
    wanted |= {name: f"{name}_" for name in inner if name in taken}
    _rename(graph, wanted)
    # Values are not renamed, since two outputs may be one value, and an output may be an input.
    for value, name in zip(graph.output, outputs, strict=True):
        graph.node.add(op_type="Identity", input=[value.name], output=[name])
        value.name = name


def _rename(graph: onnx.GraphProto, wanted: dict[str, str]) -> None:
    values = (graph.input, graph.output, graph.value_info, graph.initializer)
    for value in (value for kind in values for value in kind):
        value.name = wanted.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [wanted.get(name, name) for name in node.input]
        node.output[:] = [wanted.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, wanted)
