"""Groups of ranks that a graph communicates in."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import fx, nn

from torch_ort.pytorch.private import OpOverload, OpOverloadPacket, _resolve_process_group

# The namespaces of operators that communicate.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


def are_there() -> bool:
    """Tell whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def groups_in(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """Give the process groups of a graph from Dynamo, by name, in the order of their names.

    They are those of its operators, also in graphs that operators take, and those of the device
    meshes of its inputs.
    """
    groups: dict[str, Any] = {}
    for mesh in _meshes(inputs):
        for group in mesh.get_all_groups():
            groups[group.group_name] = group
    for _, _, name in _collectives(module):
        groups.setdefault(name, _resolve_process_group(name))
    return _of_several_ranks(groups)


def groups_of(module: nn.Module) -> dict[str, Any]:
    """Give the process groups of the parts of a module that communicate by themselves, by name.

    A class of such modules has a group as its attribute `communicates_in` (torch_ort/parallel.py).
    """
    found = (getattr(type(part), "communicates_in", None) for part in module.modules())
    return _of_several_ranks({each.group_name: each for each in found if each is not None})


def groups_named(names: Iterable[str]) -> dict[str, Any]:
    """Give the process groups of several ranks that have some names, in their order."""
    return _of_several_ranks({name: _resolve_process_group(name) for name in names})


def _of_several_ranks(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Give those of several ranks, in the order of their names, which is that of all ranks."""
    return {name: groups[name] for name in sorted(groups) if groups[name].size() > 1}


def _meshes(inputs: Sequence[Any]) -> Iterator[Any]:
    tensors = sys.modules.get("torch.distributed.tensor")  # imported by who has such tensors
    if tensors is None:
        return
    for value in inputs:
        if isinstance(value, tensors.DTensor):
            yield value.device_mesh


def collectives_inside(module: fx.GraphModule) -> dict[str, list[str]]:
    """Describe what graphs communicate that operators take, such as the branches of torch.cond.

    Such an operator may be one node that calls Python. The lines are by the name of the group, in
    the order of the graphs.
    """
    found: dict[str, list[str]] = {}
    for path, node, name in _collectives(module):
        if path:
            rest = [each for each in node.args if isinstance(each, str | int | list)]
            found.setdefault(name, []).append(f"{path}: {node.target} {rest}")
    return found


def _collectives(module: fx.GraphModule) -> Iterator[tuple[str, fx.Node, str]]:
    """Give what communicates in a graph and in those in it, which have a path, and its group."""
    for path, part in module.named_modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            given = _group_argument(node)
            if isinstance(given, fx.Node):
                given = given.meta.get("example_value")
            if isinstance(given, dist.ProcessGroup):
                given = given.group_name
            if isinstance(given, str):
                yield path, node, given


def _group_argument(node: fx.Node) -> Any:
    """Give the group of a node that communicates; None for all others."""
    target = node.target
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, OpOverload) or target.namespace not in _NAMESPACES:
        return None
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("group_name")


def timeout_of(group: Any) -> timedelta:
    """Give how long the ranks of a group wait for each other."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return options._timeout
    return store_of(group).timeout


def store_of(group: Any) -> Any:
    """Give the store that the ranks of a group share."""
    return group.get_group_store()
