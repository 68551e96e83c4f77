# Graphs as ONNX text, for the tests of rooms that take graphs.
from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx.parser
import onnx.printer

from torch_ort import _C


def read(text: str, allow: Sequence[str] = ()) -> _C.Graph:
    """Read a model in ONNX's textual syntax."""
    return _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString(), allow=allow)


def read_body(body: str, opset: int = 20, allow: Sequence[str] = ()) -> _C.Graph:
    """Read one graph in ONNX's textual syntax, the head of the model left out."""
    domains = f'"" : {opset}, "torch_ort" : 1, "com.microsoft" : 1, "org.pytorch.aten" : 1'
    return read(f"<ir_version: 10, opset_import: [{domains}]>\n{body}", allow)


def proto(graph: _C.Graph, opset: int = 0) -> onnx.ModelProto:
    """Write a graph as a ModelProto of the onnx package."""
    return onnx.ModelProto.FromString(graph.to_onnx(opset))


def show(graph: _C.Graph) -> str:
    """Write a graph in ONNX's textual syntax."""
    return onnx.printer.to_text(proto(graph))


def lines(graph: _C.Graph) -> list[str]:
    """List the nodes of a graph, one text each, such as `y = Add(a, b)`."""
    return [
        f"{', '.join(node['outputs'])} = {node['op']}({', '.join(node['inputs'])})"
        for node in graph.nodes()
    ]
