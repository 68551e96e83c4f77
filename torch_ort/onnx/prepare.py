"""A file as the engine reads it.

Functions of the file are spelled out, scans are loops, and operators of Python are marked.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import inliner, version_converter

from torch_ort import _C
from torch_ort.onnx.functions.table import TABLE, Row
from torch_ort.onnx.functions.types import FUNCTION_DOMAIN
from torch_ort.onnx.scans import without_scans

# The engine's operators are those of this opset and newer ones.
OLDEST_OPSET = 13


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the model as the engine reads it; the given one stays as it is, or is the result.

    Functions that the file defines are written where they are called, an opset older than 13
    becomes 13, and nodes that functions of torch_ort/onnx/functions compute are marked.

    Raises UserError if an old opset cannot be converted.
    """
    versions = {each.domain: each.version for each in model.opset_import}
    if model.functions:
        model = inliner.inline_local_functions(model)
    model = at_least(model, OLDEST_OPSET)
    versions |= {each.domain: each.version for each in model.opset_import}
    has_scans = any(node.op_type == "Scan" for node in nodes_of(model.graph))
    if not has_scans and not any(map(_row, nodes_of(model.graph))):
        return model
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    if has_scans:
        without_scans(copied.graph, _names(copied.graph))
    rows = [(node, row) for node in nodes_of(copied.graph) if (row := _row(node))]
    for domain in sorted({_mark(node, row, versions) for node, row in rows}):
        copied.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return copied


def _row(node: onnx.NodeProto) -> Row | None:
    """Give the row of the function that computes a node; None if the engine does."""
    row = TABLE.get((_domain(node), node.op_type))
    return row if row and (not row.when or row.when(node)) else None


def _names(graph: onnx.GraphProto) -> set[str]:
    """Give the names of all values of a graph and of the graphs in it."""
    names = {each.name for each in (*graph.input, *graph.initializer)}
    for node in graph.node:
        names.update(node.input, node.output)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                names |= _names(attribute.g)
    return names


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Give the nodes of a graph and of the graphs in their attributes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(attribute.g)


def _mark(node: onnx.NodeProto, row: Row, versions: dict[str, int]) -> str:
    """Move a node into the domain of functions, which is the result (csrc/ops/function.h)."""
    domain = _domain(node)
    facts = {"numbers": list(row.numbers), "draws": int(row.draws)}
    if row.takes("opset"):
        facts["opset"] = versions.get(domain, 1)
    for name, given in facts.items():
        if given != []:
            node.attribute.append(onnx.helper.make_attribute(f"torch_ort.{name}", given))
    node.domain = f"{FUNCTION_DOMAIN}.{domain}" if domain else FUNCTION_DOMAIN
    return node.domain


def at_least(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Give the model with an older opset converted to a newer one.

    Raises Unsupported for a Scan of opset 8, which has other inputs, and UserError where onnx
    cannot convert an operator.
    """
    found = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    if not found or found[0] >= opset:
        return model
    if found[0] < 9 and any(node.op_type == "Scan" for node in nodes_of(model.graph)):
        raise _C.Unsupported(f"Scan: opset: got {found[0]}, which scans batches, want 9 or newer")
    try:
        return version_converter.convert_version(model, opset)
    except Exception as error:  # it raises what its C++ throws, of many types
        raise _C.UserError(
            f"opset: got {found[0]}, which cannot become {opset}: {error}"
        ) from error
