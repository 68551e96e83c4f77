"""What exporters compute from constants, as constants, and parts of sequences as slices.

Such are the factors of a Resize and the bounds of a Range, and what they take from the sizes of a
weight. A weight is no constant: initializers of floating point with dims stay what they are, and
so does what is computed from their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from torch_ort.onnx.graphs import Names

# What numbers are computed by.
_OPS = frozenset({
    "Add", "Cast", "CastLike", "Ceil", "Concat", "ConstantOfShape", "Div", "Expand", "Floor",
    "Gather", "Mul", "Neg", "Range", "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Transpose",
    "Unsqueeze",
})  # fmt: skip
# More numbers than this are data.
_MOST = 64
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def fold_numbers(graph: onnx.GraphProto, opset: int, names: Names) -> None:
    """Replace nodes of a graph that compute few numbers from few constants by constants.

    Where a SequenceAt takes a part that SplitToSequence has made, it becomes a Slice. `names` are
    those of the graph.
    """
    _Folder(graph, opset, names).run()


class _Folder:
    def __init__(self, graph: onnx.GraphProto, opset: int, names: Names) -> None:
        self._graph, self._opset, self._names = graph, opset, names
        self._dims = {each.name: list(each.dims) for each in graph.initializer}
        self._known = {
            each.name: array
            for each in graph.initializer
            if _is_number(each) and (array := _array(each)) is not None
        }
        self._splits: dict[str, onnx.NodeProto] = {}  # by the sequence that they make
        self._sizes: set[str] = set()  # integers that sizes of tensors tell

    def run(self) -> None:
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            # The engine's reader says what is wrong with a node that lacks something.
            is_whole = (
                not node.domain and node.output and (node.input or node.op_type == "Constant")
            )
            nodes += self._folded(node) if is_whole else [node]
        read = {name for node in nodes for name in node.input}
        kept = [
            node
            for node in nodes
            if node.op_type != "SplitToSequence" or node.domain or read & set(node.output)
        ]
        del self._graph.node[:]
        self._graph.node.extend(kept)

    def _folded(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Give the nodes that take the place of one."""
        if node.op_type == "Constant":
            value = _constant(node)
            if value is not None and value.size <= _MOST:
                self._known[node.output[0]] = value
        elif node.op_type == "Shape" and node.input[0] in self._dims:
            given = {each.name: each.i for each in node.attribute}
            dims = self._dims[node.input[0]]
            part = dims[slice(given.get("start", 0), given.get("end", len(dims)))]
            return [self._number(node.output[0], np.array(part, dtype=np.int64))]
        elif node.op_type == "SplitToSequence":
            self._splits[node.output[0]] = node
        elif node.op_type == "SequenceAt" and node.input[0] in self._splits:
            return self._slice(node, self._splits[node.input[0]]) or [node]
        elif node.op_type in _OPS and len(node.output) == 1:
            result = self._computed(node)
            if result is not None and result.size <= _MOST:
                return [self._number(node.output[0], result)]
            if node.op_type == "CastLike":
                return [self._cast(node)]
            if _keeps_int64(node) and all(self._is_size(name) for name in node.input):
                self._sizes.update(node.output)
        elif node.op_type in ("Shape", "Size"):
            self._sizes.update(node.output)
        return [node]

    def _is_size(self, name: str) -> bool:
        """Tell whether a value is an integer that is computed from sizes."""
        known = self._known.get(name)
        return not name or name in self._sizes or (known is not None and known.dtype == np.int64)

    def _cast(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Give a CastLike as a Cast, or as a constant, where the dtype is known."""
        x, like = node.input[0], node.input[-1]
        if node.attribute:  # of rounding and of what is beyond the dtype
            return node
        if self._is_size(like):
            dtype = np.dtype(np.int64)
        elif like in self._known:
            dtype = self._known[like].dtype
        else:
            return node
        if x in self._known:
            return self._number(node.output[0], self._known[x].astype(dtype))
        if dtype == np.int64 and self._is_size(x):
            self._sizes.update(node.output)
        to = helper.np_dtype_to_tensor_dtype(dtype)
        return helper.make_node("Cast", [x], node.output, node.name, to=to)

    def _number(self, name: str, value: np.ndarray) -> onnx.NodeProto:
        self._known[name] = value
        tensor = numpy_helper.from_array(np.array(value, order="C"), name)
        return helper.make_node("Constant", [], [name], value=tensor)

    def _computed(self, node: onnx.NodeProto) -> np.ndarray | None:
        """Compute a node of constants; None where it has others, or they do not fit.

        The engine's reader says of the latter what is wrong.
        """
        names = [name for name in dict.fromkeys(node.input) if name]
        if not names or not all(name in self._known for name in names):
            return None
        given = {name: self._known[name] for name in names}
        if _size_of(node, given) > _MOST:
            return None
        values = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in given.items()
        ]
        output = onnx.ValueInfoProto(name=node.output[0])
        graph = helper.make_graph([node], "numbers", values, [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)])
        try:
            (result,) = ReferenceEvaluator(model).run(None, given)
        except Exception:  # numpy and onnx raise errors of many types
            return None
        return np.asarray(result)

    def _slice(self, at: onnx.NodeProto, split: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Give the nodes of a part of a sequence; none where its place is not known."""
        axis = next((each.i for each in split.attribute if each.name == "axis"), 0)
        place = self._known.get(at.input[1]) if len(at.input) > 1 else None
        sizes = self._known.get(split.input[1]) if len(split.input) > 1 else None
        if place is None or sizes is None or place.size != 1 or int(place.item()) < 0:
            return []
        i = int(place.item())
        if sizes.ndim == 0:
            first, last = i * int(sizes), (i + 1) * int(sizes)
        elif i < len(sizes):
            first, last = int(sizes[:i].sum()), int(sizes[: i + 1].sum())
        else:
            return []
        names = []
        nodes = []
        for word, number in (("first", first), ("last", last), ("axis", axis)):
            names.append(self._names.new(f"{at.output[0]}_{word}"))
            nodes.append(self._number(names[-1], np.array([number], dtype=np.int64)))
        nodes.append(helper.make_node("Slice", [split.input[0], *names], at.output, at.name))
        return nodes


def _keeps_int64(node: onnx.NodeProto) -> bool:
    """Tell whether a node computes integers of 64 bits from such."""
    if node.op_type == "Cast":
        return any(each.name == "to" and each.i == TensorProto.INT64 for each in node.attribute)
    return node.op_type not in ("ConstantOfShape", "Sqrt")


def _size_of(node: onnx.NodeProto, given: Mapping[str, np.ndarray]) -> float:
    """Give how many numbers a node makes of its inputs, where these do not bound it."""
    values = [given.get(name) for name in node.input]
    if node.op_type == "ConstantOfShape" and values[0] is not None:
        return float(np.prod(values[0].astype(np.float64)))
    if node.op_type == "Expand" and values[-1] is not None and values[0] is not None:
        return float(np.prod(values[-1].astype(np.float64)) * values[0].size)
    if node.op_type == "Range" and all(each is not None and each.size == 1 for each in values):
        start, limit, delta = (float(each.item()) for each in values if each is not None)
        return (limit - start) / delta if delta else math.inf
    return 0.0


def _array(tensor: TensorProto) -> np.ndarray | None:
    """Give the numbers of a tensor; None if they stand elsewhere, or do not fit its sizes."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return numpy_helper.to_array(tensor)
    except Exception:  # numpy and onnx raise errors of many types
        return None


def _is_number(tensor: TensorProto) -> bool:
    is_weight = bool(tensor.dims) and tensor.data_type in FLOATS
    return not is_weight and np.prod(tensor.dims, dtype=np.int64) <= _MOST


def _constant(node: onnx.NodeProto) -> np.ndarray | None:
    """Give the numbers of a Constant; None for a text or a sparse tensor."""
    for each in node.attribute:
        match each.name:
            case "value":
                return _array(each.t)
            case "value_int" | "value_ints":
                value = each.i if each.name == "value_int" else list(each.ints)
                return np.array(value, dtype=np.int64)
            case "value_float" | "value_floats":
                value = each.f if each.name == "value_float" else list(each.floats)
                return np.array(value, dtype=np.float32)
    return None
