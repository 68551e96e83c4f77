"""Two backwards in one recorded graph, for two states of autocast: compares and separates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

BACKWARD = "is_backward"  # the tag by which forward and backward are told apart
INSIDE = "is_backward_inside"  # the tag of a backward under the autocast of forward


def are_equal(graph: fx.Graph, gradients: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether both backwards are the same calls, which give these gradients."""
    first = [node for node in graph.nodes if node.meta.get("partitioner_tag") == BACKWARD]
    second = [node for node in graph.nodes if node.meta.get("partitioner_tag") == INSIDE]
    # Constants that both read were recorded with the first.
    first = [node for node in first if node.op != "get_attr"]
    if len(first) != len(second):
        return False
    same: dict[fx.Node, fx.Node] = {}
    for node, other in zip(first, second, strict=True):
        if node.target is not other.target or _words(node, same) != _words(other, {}):
            return False
        same[node] = other
    return [same.get(node, node) for node in gradients] == list(others)


def _words(node: fx.Node, same: dict[fx.Node, fx.Node]) -> str:
    return repr(fx.node.map_arg((node.args, node.kwargs), lambda arg: same.get(arg, arg)))


def with_inside_alone(
    graph: fx.Graph, values: Sequence[Any], gradients: Sequence[Any]
) -> tuple[fx.Graph, list[Any], list[Any]]:
    """Copy a graph that has no output yet, with only the backward under forward's autocast.

    Give the copy, and these nodes in it.
    """
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    copy.graph_copy(graph, nodes)

    def in_copy(items: Sequence[Any]) -> list[Any]:
        return [nodes[item] if isinstance(item, fx.Node) else item for item in items]

    needed = set(in_copy(gradients))
    for node in reversed(copy.nodes):
        tag = node.meta.get("partitioner_tag")
        if tag == BACKWARD and not node.users and node not in needed:
            copy.erase_node(node)
        elif tag == INSIDE:
            node.meta["partitioner_tag"] = BACKWARD
    return copy, in_copy(values), in_copy(gradients)


def erase_inside(graph: fx.Graph) -> None:
    """Remove the backward under forward's autocast."""
    for node in reversed(graph.nodes):
        if node.meta.get("partitioner_tag") == INSIDE:
            graph.erase_node(node)
