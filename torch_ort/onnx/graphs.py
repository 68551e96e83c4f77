"""Graphs of files: the graphs in them, their nodes and inputs, and names for new values."""

from __future__ import annotations

from collections.abc import Iterator

import onnx


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Give a graph, and after it the graphs in the attributes of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_of(attribute.g)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Give the nodes of a graph and of the graphs in their attributes."""
    for each in graphs_of(graph):
        yield from each.node


def inputs_of(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Give the inputs that a call passes; old files list initializers among them, too."""
    weights = {each.name for each in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


class Names:
    """The names of all values of a graph and of the graphs in it, to which new ones are added."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._taken: set[str] = set()
        for each in graphs_of(graph):
            self._taken |= {value.name for value in (*each.input, *each.initializer)}
            for node in each.node:
                self._taken.update(node.input, node.output)

    def new(self, word: str) -> str:
        """Give a name like a word, which no value has."""
        found, count = word, 1
        while found in self._taken:
            count += 1
            found = f"{word}_{count}"
        self._taken.add(found)
        return found
