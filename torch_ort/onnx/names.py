"""Names of the values of a graph, and new ones."""

from __future__ import annotations

import onnx


class Names:
    """The names of all values of a graph and of the graphs in it, to which new ones are added."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._taken: set[str] = set()
        self._take(graph)

    def _take(self, graph: onnx.GraphProto) -> None:
        self._taken |= {each.name for each in (*graph.input, *graph.initializer)}
        for node in graph.node:
            self._taken.update(node.input, node.output)
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    self._take(attribute.g)

    def new(self, word: str) -> str:
        """Give a name like a word, which no value has."""
        found, count = word, 1
        while found in self._taken:
            count += 1
            found = f"{word}_{count}"
        self._taken.add(found)
        return found
