"""What a file has in it, who computes its operators, and what would be trained."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import onnx
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_ort import _C
from torch_ort.onnx.functions.types import FUNCTION_DOMAIN
from torch_ort.onnx.graphs import inputs_of, nodes_of
from torch_ort.onnx.load import OnnxModule, load_onnx
from torch_ort.onnx.prepare import prepared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--trainable", nargs="*", metavar="PATTERN", help="names of weights to be trained"
    )


def run(options: argparse.Namespace) -> int:
    """Show what a file needs and what would be trained; 2 where it cannot be loaded."""
    console = Console()
    path: Path = options.file
    model = onnx.load(path, load_external_data=False)
    opsets = ", ".join(f"{each.domain or 'ai.onnx'} {each.version}" for each in model.opset_import)
    producer = model.producer_name or "an unnamed producer"
    console.print(f"{path}: opsets {opsets}; by {producer}", markup=False)
    for kind, values in (("input", inputs_of(model.graph)), ("output", model.graph.output)):
        for value in values:
            console.print(f"{kind} {text_of(value)}", markup=False)
    console.print(_operators(model))
    try:
        loaded = load_onnx(path, True if options.trainable is None else options.trainable)
    except _C.Error as error:
        console.print(f"cannot be loaded: {error}", markup=False)
        return 2
    console.print(_weights(loaded))
    trained = sum(each.numel() for each in loaded.parameters())
    console.print(f"{trained:,} of {trained + _frozen(loaded):,} numbers are trained")
    return 0


def text_of(value: onnx.ValueInfoProto) -> str:
    """Give name, dtype and sizes of an input or output."""
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return f"{value.name}: no tensor"
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    sizes = [dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?")
             for dim in tensor.shape.dim]  # fmt: skip
    return f"{value.name}: {dtype} ({', '.join(sizes)})"


def _operators(model: onnx.ModelProto) -> Table:
    counts: Counter[tuple[str, str]] = Counter()
    for node in nodes_of(prepared(model).graph):
        is_function = node.domain.startswith(FUNCTION_DOMAIN)
        domain = node.domain.removeprefix(FUNCTION_DOMAIN).removeprefix(".")
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        counts[name, "a function of PyTorch's" if is_function else "the engine"] += 1
    table = Table("operator", "nodes", "computed by")
    for (name, by), count in sorted(counts.items()):
        table.add_row(escape(name), str(count), by)
    return table


def _weights(loaded: OnnxModule) -> Table:
    trained = {name for name, _ in loaded.named_parameters()}
    table = Table("weight", "dtype", "sizes", "trained")
    for name, tensor in loaded.state_dict().items():
        sizes = " x ".join(map(str, tensor.shape))
        row = (escape(loaded.onnx_names[name]), str(tensor.dtype).removeprefix("torch."), sizes)
        table.add_row(*row, "yes" if name in trained else "no")
    return table


def _frozen(loaded: OnnxModule) -> int:
    state = loaded.state_dict()
    trained = {name for name, _ in loaded.named_parameters()}
    floats = (x for n, x in state.items() if n not in trained and torch.is_floating_point(x))
    return sum(each.numel() for each in floats)
