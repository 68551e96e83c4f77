"""Scan as Loop, which is the one that the engine reads."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from torch_ort import _C
from torch_ort.onnx.graphs import Names


def without_scans(graph: onnx.GraphProto, names: Names) -> None:
    """Replace the Scan nodes of a graph, and of the graphs in it, by Loop and Gather nodes.

    `names` are those of the outermost graph.
    """
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                without_scans(attribute.g, names)
    if not any(node.op_type == "Scan" and not node.domain for node in graph.node):
        return
    nodes = [
        made
        for node in graph.node
        for made in (
            _Scan(node, names).written() if node.op_type == "Scan" and not node.domain else [node]
        )
    ]
    del graph.node[:]
    graph.node.extend(nodes)


class _Scan:
    def __init__(self, node: onnx.NodeProto, names: Names) -> None:
        self._node = node
        self._names = names
        self._attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        body, scanned = self._attributes.get("body"), self._attributes.get("num_scan_inputs")
        if not isinstance(body, onnx.GraphProto) or not isinstance(scanned, int):
            raise self._error("attributes", "too few", "body and num_scan_inputs")
        self._body, self._num_scanned = body, scanned
        self._num_states = len(body.input) - scanned
        if len(node.input) != len(body.input):
            raise self._error("inputs", len(node.input), f"{len(body.input)} as its body has")
        if scanned < 1 or self._num_states < 0:
            raise self._error("num_scan_inputs", scanned, f"1 to {len(body.input)}")
        if not self._num_states <= len(node.output) <= len(body.output):
            raise self._error("outputs", len(node.output), f"up to {len(body.output)}")
        for name, count in (("scan_input", scanned), ("scan_output", len(body.output))):
            for kind in ("axes", "directions"):
                given = self._attributes.get(f"{name}_{kind}", [])
                if given and (isinstance(given, int) or len(given) > count):
                    raise self._error(f"{name}_{kind}", given, "a number for each")

    def _error(self, what: str, got: object, want: str) -> _C.UserError:
        return _C.UserError(f"Scan: {what}: got {got}, want {want} (node '{self._node.name}')")

    def written(self) -> list[onnx.NodeProto]:
        """Give the nodes that take the place of the Scan."""
        nodes: list[onnx.NodeProto] = []
        count = self._count(nodes)
        body = onnx.GraphProto()
        number, holds, still_holds = (
            self._new(word) for word in ("number", "holds", "still_holds")
        )
        body.name = self._body.name or "scan"
        body.input.append(helper.make_tensor_value_info(number, TensorProto.INT64, []))
        body.input.append(helper.make_tensor_value_info(holds, TensorProto.BOOL, []))
        body.input.extend(self._body.input[: self._num_states])
        for i, given in enumerate(self._body.input[self._num_states :]):
            place = number
            if self._of(i, "scan_input_directions"):
                last, place = self._new("last"), self._new("place")
                one = self._constant(body.node, [], 1)
                body.node.append(helper.make_node("Sub", [count, one], [last]))
                body.node.append(helper.make_node("Sub", [last, number], [place]))
            body.node.append(
                helper.make_node(
                    "Gather", [self._node.input[self._num_states + i], place], [given.name],
                    axis=self._of(i, "scan_input_axes"),
                )
            )  # fmt: skip
        body.node.extend(self._body.node)
        body.node.append(helper.make_node("Identity", [holds], [still_holds]))
        body.initializer.extend(self._body.initializer)
        body.output.append(helper.make_tensor_value_info(still_holds, TensorProto.BOOL, []))
        body.output.extend(self._body.output)
        states = [*self._node.output[: self._num_states]]
        stacks = self._node.output[self._num_states :]
        raw = [
            self._new(name or "stack") if self._is_moved(i) else name
            for i, name in enumerate(stacks)
        ]
        nodes.append(
            helper.make_node(
                "Loop", [count, "", *self._node.input[: self._num_states]], [*states, *raw],
                name=self._node.name, body=body,
            )
        )  # fmt: skip
        for i, (stack, result) in enumerate(zip(raw, stacks, strict=True)):
            if result and self._is_moved(i):
                self._move(nodes, i, stack, result)
        return nodes

    def _count(self, nodes: list[onnx.NodeProto]) -> str:
        """Write the number of rounds: the size of the first scanned input along its axis."""
        shape, count = self._new("shape"), self._new("count")
        nodes.append(helper.make_node("Shape", [self._node.input[self._num_states]], [shape]))
        axis = self._constant(nodes, [], self._of(0, "scan_input_axes"))
        nodes.append(helper.make_node("Gather", [shape, axis], [count], axis=0))
        return count

    def _of(self, i: int, name: str) -> int:
        given = self._attributes.get(name)
        return int(given[i]) if given and i < len(given) else 0

    def _is_moved(self, i: int) -> bool:
        return bool(self._of(i, "scan_output_directions") or self._of(i, "scan_output_axes"))

    def _move(self, nodes: list[onnx.NodeProto], i: int, stack: str, result: str) -> None:
        """Reverse what was stacked, and move its first axis to where the Scan wants it."""
        axis = self._of(i, "scan_output_axes")
        if self._of(i, "scan_output_directions"):
            reversed_ = self._new("reversed") if axis else result
            ends = [self._constant(nodes, [1], [at]) for at in (-1, -(2**62), 0, -1)]
            nodes.append(helper.make_node("Slice", [stack, *ends], [reversed_]))
            stack = reversed_
        if axis:
            rank = len(self._body.output[self._num_states + i].type.tensor_type.shape.dim) + 1
            order = [*range(1, rank)]
            order.insert(axis % rank, 0)
            nodes.append(helper.make_node("Transpose", [stack], [result], perm=order))

    def _constant(self, nodes: Any, dims: list[int], given: Any) -> str:
        """Write a constant of integers; gives its name."""
        name = self._new("constant")
        values = given if isinstance(given, list) else [given]
        tensor = helper.make_tensor(name, TensorProto.INT64, dims, values)
        nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def _new(self, word: str) -> str:
        return self._names.new(f"{word}_of_scan")
