"""A file as the engine reads it.

Functions of the file are spelled out, scans are loops, and operators of Python are marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import inliner, version_converter

from torch_ort import _C
from torch_ort.onnx.folding import FLOATS, fold_numbers
from torch_ort.onnx.functions import linear
from torch_ort.onnx.functions.table import BY_MODE, LINEAR, ML, TABLE, Row
from torch_ort.onnx.functions.types import FUNCTION_DOMAIN
from torch_ort.onnx.graphs import Names, graphs_of, inputs_of, nodes_of
from torch_ort.onnx.quantization import join_quantization
from torch_ort.onnx.scans import without_scans

# The engine's operators are those of this opset and newer ones.
OLDEST_OPSET = 13


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the model as the engine reads it; the given one stays as it is.

    Functions that the file defines are written where they are called, an opset older than 13
    becomes 13, and nodes that functions of torch_ort/onnx/functions compute are marked.

    Raises UserError if an old opset cannot be converted, or a node is marked in the file, and
    Unsupported for what `at_least` refuses, and for trees and other operators of classical machine
    learning that are no functions.
    """
    for node in nodes_of(model.graph):
        if str(node.domain).startswith(FUNCTION_DOMAIN):  # bytes, if they are no text
            raise _C.UserError(
                f"{node.domain}.{node.op_type} (node '{node.name}'): got a domain of this package's"
            )
    versions = {each.domain: each.version for each in model.opset_import}
    if model.functions:
        model = inliner.inline_local_functions(_with_defaults(model))
    model = at_least(model, OLDEST_OPSET)
    versions |= {each.domain: each.version for each in model.opset_import}
    matrices = {
        each.name: each.dims for each in model.graph.initializer if each.data_type in FLOATS
    }
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    graph = copied.graph
    names = Names(graph)
    if any(node.op_type == "Scan" for node in nodes_of(graph)):
        without_scans(graph, names)
    _name_sizes(graph)
    fold_numbers(graph, versions.get("", versions.get("ai.onnx", OLDEST_OPSET)), names)
    linear.read_untransposed(graph, linear.transposed(graph, matrices))
    join_quantization(graph, names)
    _settle_statistics(graph)
    rows = list(_rows(graph, matrices))
    _refuse_others(graph)
    for domain in sorted({_mark(node, domain, row, versions) for node, domain, row in rows}):
        copied.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return copied


# Their results have as many elements as data says; those of other domains may have so, too.
_BY_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})


def _with_defaults(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give a model whose calls of its own functions name all attributes that have a default.

    onnx's inliner leaves those out that a call does not name.
    """
    defaults = {
        (each.domain, each.name, each.overload): each.attribute_proto for each in model.functions
    }
    if not any(defaults.values()):
        return model
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    for graph in (copied.graph, *copied.functions):
        for node in nodes_of(graph):
            given = {each.name for each in node.attribute}
            missing = defaults.get((node.domain, node.op_type, node.overload), ())
            node.attribute.extend(each for each in missing if each.name not in given)
    return copied


def _name_sizes(graph: onnx.GraphProto) -> None:
    """Name the sizes of inputs that have no names, and forget names that nothing determines.

    Shape inference of the onnx package makes such names up for sizes that the engine can tell.
    """
    known: set[str] = set()
    by_data = {
        name
        for node in nodes_of(graph)
        if _domain(node) or node.op_type in _BY_DATA
        for name in node.output
    }
    for each in graphs_of(graph):
        values = [*each.input, *(value for value in each.value_info if value.name in by_data)]
        known |= {dim.dim_param for value in values for dim in _dims(value)}
    count = 0
    for value in inputs_of(graph):
        for dim in _dims(value):
            if dim.HasField("dim_value") or dim.dim_param:
                continue
            while f"size_{count}" in known:
                count += 1
            dim.dim_param = f"size_{count}"
            known.add(dim.dim_param)
    for each in graphs_of(graph):
        kept = [
            value
            for value in each.value_info
            if all(
                not dim.dim_param.isidentifier() or dim.dim_param in known for dim in _dims(value)
            )
        ]
        if len(kept) < len(each.value_info):
            del each.value_info[:]
            each.value_info.extend(kept)


def _dims(value: onnx.ValueInfoProto) -> Sequence[onnx.TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim


def _settle_statistics(graph: onnx.GraphProto) -> None:
    """Let batch norms read their running statistics themselves, and mark those that share them.

    An exporter that makes one initializer of equal ones has others read it by Identity nodes.
    """
    initializers = {each.name for each in graph.initializer}
    made = {node.output[0]: node for node in graph.node if node.output}
    norms = [
        node
        for node in graph.node
        if node.op_type == "BatchNormalization" and not node.domain and len(node.input) == 5
    ]
    for node in norms:
        for slot in (3, 4):
            name = node.input[slot]
            while name in made and made[name].op_type == "Identity" and made[name].input:
                name = made[name].input[0]
            if name in initializers:
                node.input[slot] = name
    readers = Counter(name for node in nodes_of(graph) for name in node.input)
    given = {value.name for value in graph.output}
    for node in graph.node:
        if node.op_type == "Identity" and not (given | readers.keys()) & set(node.output):
            readers.subtract(node.input)  # nobody reads it any more
    for node in norms:
        row = _row(node, {})
        moves_them = row is not None and row[0] == BY_MODE
        if moves_them and any(readers[node.input[slot]] > 1 for slot in (3, 4)):
            node.attribute.append(onnx.helper.make_attribute("shared", 1))


def _refuse_others(graph: onnx.GraphProto) -> None:
    """Raise Unsupported for operators of classical machine learning that no function computes."""
    here = sorted(name for domain, name in TABLE if domain == ML)
    for node in nodes_of(graph):
        if node.domain == ML and node.op_type not in here:
            raise _C.Unsupported(
                f"{ML}.{node.op_type}: got an operator of classical machine learning that is not "
                f"supported (node '{node.name or next(iter(node.output), '')}'), want one of "
                f"{', '.join(here)}"
            )


def _rows(
    graph: onnx.GraphProto, matrices: Mapping[str, Sequence[int]]
) -> Iterator[tuple[onnx.NodeProto, str, Row]]:
    """Give the nodes that the engine does not compute, each with a domain and the row."""
    for each in graphs_of(graph):
        for node in each.node:
            # Bodies of branches and loops have no linear layers, which are modules.
            if found := _row(node, matrices if each is graph else {}):
                yield node, *found


def _row(node: onnx.NodeProto, matrices: Mapping[str, Sequence[int]]) -> tuple[str, Row] | None:
    """Give the domain and the row of what computes a node; None if the engine does.

    `matrices` are the sizes of weights, products with which are modules.
    """
    domains = [_domain(node)] if _domain(node) else [BY_MODE, ""]
    if linear.has_weight(node, matrices):
        domains = [LINEAR, *domains]
    for domain in domains:
        row = TABLE.get((domain, node.op_type))
        if row and (not row.when or row.when(node)):
            return domain, row
    return None


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _mark(node: onnx.NodeProto, domain: str, row: Row, versions: dict[str, int]) -> str:
    """Move a node into a domain of functions, which is the result (csrc/ops/function.h)."""
    facts = {"numbers": list(row.numbers), "draws": int(row.draws)}
    if row.takes("opset"):
        facts["opset"] = versions.get(_domain(node), 1)
    for name, given in facts.items():
        if given != []:
            node.attribute.append(onnx.helper.make_attribute(f"torch_ort.{name}", given))
    node.domain = f"{FUNCTION_DOMAIN}.{domain}" if domain else FUNCTION_DOMAIN
    return node.domain


def at_least(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Give the model with an older opset converted to a newer one.

    Raises Unsupported for a Scan of opset 8, which has other inputs, for a Hardmax before 13, and
    for a PRelu before 7, and UserError where onnx cannot convert an operator.
    """
    found = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    if not found or found[0] >= opset:
        return model
    if found[0] < 9 and any(node.op_type == "Scan" for node in nodes_of(model.graph)):
        raise _C.Unsupported(f"Scan: opset: got {found[0]}, which scans batches, want 9 or newer")
    if found[0] < 13 <= opset and any(node.op_type == "Hardmax" for node in nodes_of(model.graph)):
        # onnx keeps the node, which would take one axis in place of all behind it.
        raise _C.Unsupported(f"Hardmax: opset: got {found[0]}, which flattens, want 13 or newer")
    if found[0] < 7 <= opset and any(node.op_type == "PRelu" for node in nodes_of(model.graph)):
        # onnx keeps the slopes, which were those of channels.
        raise _C.Unsupported(f"PRelu: opset: got {found[0]}, want 7 or newer")
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:  # it raises what its C++ throws, of many types
        raise _C.UserError(
            f"opset: got {found[0]}, which cannot become {opset}: {error}"
        ) from error
    if found[0] < 11 <= opset:
        _place_as_before(converted.graph, "floor" if found[0] < 10 else "by_factor")
    return converted


def _place_as_before(graph: onnx.GraphProto, rounding: str) -> None:
    """Have Resize place pixels as Upsample, or as the Resize of opset 10, does.

    onnx converts these to nodes of newer opsets, where other places are usual. None of these
    opsets rounds as 10 does, "by_factor", which torch_ort/onnx/functions/images.py knows.
    """
    places = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": rounding}
    for node in nodes_of(graph):
        if node.op_type == "Resize" and not node.domain:
            taken = {each.name for each in node.attribute}
            for name in places.keys() - taken:
                node.attribute.append(onnx.helper.make_attribute(name, places[name]))
