"""The differences of two files, in their graphs and in their weights."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_ort.onnx.command.info import text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("other", type=Path, help="another one")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="difference of weights that is none"
    )


def run(options: argparse.Namespace) -> int:
    """Compare two files by graph and by weights; 1 if they differ."""
    console = Console()
    one, other = (onnx.load(path) for path in (options.file, options.other))
    found = list(graph_differences(one, other))
    for line in found:
        console.print(line, markup=False)
    table, count = _weights(one.graph, other.graph, options.tolerance)
    if count:
        console.print(table)
    words = "the graphs are the same" if not found else f"{len(found)} differences of the graphs"
    console.print(f"{words}; {count} weights differ")
    return int(bool(found or count))


def graph_differences(one: onnx.ModelProto, other: onnx.ModelProto) -> Iterator[str]:
    """Give in words what differs in two models, weights aside. Nodes are known by their outputs."""
    first, second = (
        {e.domain or "ai.onnx": e.version for e in m.opset_import} for m in (one, other)
    )
    yield from _changes("opset", {k: str(v) for k, v in first.items()},
                        {k: str(v) for k, v in second.items()})  # fmt: skip
    for kind in ("input", "output"):
        texts = [{v.name: text_of(v) for v in getattr(m.graph, kind)} for m in (one, other)]
        yield from _changes(kind, *texts)
    yield from _changes("node", *(dict(map(_node, m.graph.node)) for m in (one, other)))


def _node(node: onnx.NodeProto) -> tuple[str, str]:
    """Give the outputs of a node, by which it is known, and what it is."""
    texts = [
        _text_of_attribute(each) for each in sorted(node.attribute, key=lambda each: each.name)
    ]
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    given = f" <{', '.join(texts)}>" if texts else ""
    return ", ".join(node.output), f"{name}{given} ({', '.join(node.input)})"


def _text_of_attribute(attribute: onnx.AttributeProto) -> str:
    """Give an attribute as text; of a tensor or a graph, a number that tells it from others."""
    text = onnx.helper.printable_attribute(attribute)
    is_whole = attribute.type not in (
        onnx.AttributeProto.TENSOR, onnx.AttributeProto.GRAPH, onnx.AttributeProto.SPARSE_TENSOR,
        onnx.AttributeProto.TENSORS, onnx.AttributeProto.GRAPHS,
    )  # fmt: skip
    if is_whole:
        return text
    data = attribute.SerializeToString(deterministic=True)
    return f"{text} #{hashlib.sha256(data).hexdigest()[:8]}"


def _changes(kind: str, first: dict[str, str], second: dict[str, str]) -> Iterator[str]:
    for name in [*first, *(each for each in second if each not in first)]:
        old, new = first.get(name), second.get(name)
        if old == new:
            continue
        if new is None:
            yield f"{kind} {name}: gone, was {old}"
        elif old is None:
            yield f"{kind} {name}: new, {new}"
        else:
            yield f"{kind} {name}: {old} became {new}"


def _weights(one: onnx.GraphProto, other: onnx.GraphProto, tolerance: float) -> tuple[Table, int]:
    """Give a table of the weights that differ, and their number."""
    first, second = ({e.name: e for e in graph.initializer} for graph in (one, other))
    table = Table("weight", "sizes", "greatest difference", "norm of the difference / norm")
    count = 0
    for name in [*first, *(each for each in second if each not in first)]:
        row = _difference(first.get(name), second.get(name), tolerance)
        if row:
            count += 1
            table.add_row(escape(name), *row)
    return table, count


def _difference(
    first: onnx.TensorProto | None, second: onnx.TensorProto | None, tolerance: float
) -> tuple[str, str, str] | None:
    """Give what a row says of a weight in two files; None if it is the same in both."""
    if first is None or second is None:
        there = first or second
        return (
            " x ".join(map(str, there.dims if there else ())),
            "new" if first is None else "gone",
            "",
        )
    a, b = (numpy_helper.to_array(each).astype(np.float64) for each in (first, second))
    if a.shape != b.shape:
        return f"{a.shape} and {b.shape}", "", ""
    if first.data_type == second.data_type and np.array_equal(a, b, equal_nan=True):
        return None
    far = float(np.max(np.abs(a - b), initial=0.0))
    if first.data_type == second.data_type and far <= tolerance:
        return None
    norm = float(np.linalg.norm(a))
    relative = float(np.linalg.norm(a - b)) / norm if norm else float("inf")
    return " x ".join(map(str, a.shape)), f"{far:.3g}", f"{relative:.3g}"
