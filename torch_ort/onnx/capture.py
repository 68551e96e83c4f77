"""A module's call without gradients, captured by an ORTModule, as an ONNX model."""

from __future__ import annotations

import re
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch

from torch_ort.core.log_level import LogLevel
from torch_ort.onnx.graphs import graphs_of
from torch_ort.ortmodule import DebugOptions, ORTModule


def captured_model(
    module: torch.nn.Module, run: Callable[[ORTModule], Any], config: Mapping[str, Any]
) -> onnx.ModelProto | None:
    """Give the graph that `run(ORTModule(module))` captures; None if it ran in eager PyTorch.

    `config` are options by name, such as the opset. Weights are initializers.
    """
    with tempfile.TemporaryDirectory() as folder:
        prefix = uuid.uuid4().hex
        options = DebugOptions(LogLevel.ERROR, True, prefix, folder, config=dict(config))
        try:
            run(ORTModule(module, options))
            found = Path(options.save_path) / f"{prefix}_optimized_inference.onnx"
            return onnx.load(found) if found.exists() else None
        finally:  # the environment may have chosen another folder
            for file in Path(options.save_path).glob(f"{prefix}_*"):
                file.unlink()


def name_sizes(graph: onnx.GraphProto, wanted: Mapping[str, str | int]) -> None:
    """Put names or numbers in the places of symbols of sizes, in all shapes of the graph."""
    if not wanted:
        return
    symbols = re.compile(rf"\b({'|'.join(map(re.escape, wanted))})\b")
    for each in graphs_of(graph):
        for value in (*each.input, *each.value_info, *each.output):
            for dim in value.type.tensor_type.shape.dim:
                text = symbols.sub(lambda found: str(wanted[found[1]]), dim.dim_param)
                if not text:  # a number
                    continue
                if {*re.findall(r"[A-Za-z_]\w*", text)} <= _FUNCTIONS.keys():
                    dim.dim_value = eval(text, dict(_FUNCTIONS))  # the engine's own expression
                else:
                    dim.dim_param = text


_FUNCTIONS = {"min": min, "max": max}


def name_values(
    graph: onnx.GraphProto, wanted: Mapping[str, str], outputs: list[str] | tuple[str, ...]
) -> None:
    """Rename values; the outputs get names of their own."""
    taken = {*wanted.values(), *outputs}
    inner = (name for node in graph.node for name in node.output)
    _rename(graph, {**wanted, **{name: f"{name}_" for name in inner if name in taken}})
    # Values are not renamed, since two outputs may be one value, and an output may be an input.
    for value, name in zip(graph.output, outputs, strict=True):
        graph.node.add(op_type="Identity", input=[value.name], output=[name])
        value.name = name


def _rename(graph: onnx.GraphProto, wanted: Mapping[str, str]) -> None:
    for each in graphs_of(graph):
        for value in (*each.input, *each.output, *each.value_info, *each.initializer):
            value.name = wanted.get(value.name, value.name)
        for node in each.node:
            node.input[:] = [wanted.get(name, name) for name in node.input]
            node.output[:] = [wanted.get(name, name) for name in node.output]
