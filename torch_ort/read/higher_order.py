"""Operators without a schema: `auto_functionalized` becomes clone and call, the rest run in Python.

The reader of FX graphs comes here with their nodes, and gives itself.

What runs in Python does so in the dispatch state of eager PyTorch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from torch_ort._C import Unsupported
from torch_ort.pytorch import graph_compat, module_compat, trace_compat
from torch_ort.pytorch.graph_compat import auto_functionalize
from torch_ort.read.descriptions import type_of

_callables: dict[int, Any] = {}
_keys = itertools.count(1)

_library = torch.library.Library("torch_ort", "FRAGMENT")
_library.define("call_python(int key, Tensor?[] tensors, int[] sizes) -> Tensor[]")


def _call_python(
    key: int, tensors: list[torch.Tensor | None], sizes: list[int]
) -> list[torch.Tensor]:
    # A mode that watches the first call would otherwise see every operator inside.
    with trace_compat.real_tensors():
        return _callables[key](tensors, sizes)


_library.impl("call_python", _call_python, "CompositeExplicitAutograd")


def add_node(reader: Any, node: fx.Node) -> None:
    """Add a higher-order node. Raises Unsupported if its results are not tensors."""
    if node.target is auto_functionalize.auto_functionalized_v2:
        _add_auto_functionalized(reader, node)
    elif node.target is auto_functionalize.auto_functionalized:
        _add_auto_functionalized_v1(reader, node)
    else:
        _add_python_call(reader, node)


def release_callables() -> None:
    """Forget the callables of all graphs; called when compiled code is reset."""
    _callables.clear()


def _clone(reader: Any, base: fx.Node, name: str) -> str:
    # The clone is marked as an effect, so that no pass merges two clones of a value.
    reader.add_private_clone(base, name)
    return name


def _add_auto_functionalized(reader: Any, node: fx.Node) -> None:
    """`auto_functionalized_v2(op, **kwargs)`: bases are cloned, arguments are views of the clones.

    Its results are those of the operator, then the bases as they are afterwards.
    """
    op = node.args[0]
    if not isinstance(op, graph_compat.OpOverload):
        raise Unsupported(
            f"node {node.name}: auto_functionalized of {op}, which is not an operator"
        )
    kwargs = dict(node.kwargs)
    bases = kwargs.pop("_all_bases")
    clones = [
        None if base is None else _clone(reader, base, f"{node.name}.base{i}")
        for i, base in enumerate(bases)
    ]
    mutable, _ = auto_functionalize.get_mutable_args(op)
    values: dict[str, Any] = {}
    written: list[tuple[str, str]] = []  # name of the argument's value, and of its base
    for argument in mutable:
        if f"_{argument}_length" in kwargs:
            raise Unsupported(f"node {node.name}: {op} changes a list of tensors")
        index = kwargs.pop(f"_{argument}_base_index", None)
        if index is None:
            values[argument] = None
            continue
        view = _view_of_base(reader, node, kwargs, argument, clones[index], bases[index])
        values[argument] = ("%", view)
        written.append((view, clones[index]))
    for name, value in kwargs.items():
        if not name.startswith("_"):
            values[name] = reader.argument(value)
    returned, types = _operator_results(node, op)
    mutated = [f"{node.name}.mutated{i}" for i in range(len(written))]
    reader.emit_mutation(node, op, values, returned, types, mutated)
    for i, clone in enumerate(clones):
        if clone is None:
            continue
        whole = [
            after
            for after, (view, base) in zip(mutated, written, strict=True)
            if base == clone == view
        ]
        parts = [after for after, (_, base) in zip(mutated, written, strict=True) if base == clone]
        name = f"{node.name}.{_first_base(op) + i}"
        if whole or not parts:
            reader.rename_result(name, whole[0] if whole else clone)
        else:
            # Only a view of the base was an argument. The copy is an effect too, and comes after
            # the call.
            reader.copy_after_mutation(clone, name, bases[i])


def _first_base(op) -> int:
    """Index of the first base among the results; without other results None stands before it."""
    return max(1, len(graph_compat.schema(op).returns))


def _view_of_base(reader, node, kwargs, argument, clone: str, base: fx.Node) -> str:
    """The argument as the recorded view of its base."""
    if kwargs.pop(f"_{argument}_alias", False):
        return clone
    size = kwargs.pop(f"_{argument}_size", None)
    if size is not None:
        stride = kwargs.pop(f"_{argument}_stride")
        offset = kwargs.pop(f"_{argument}_storage_offset")
        name = f"{node.name}.{argument}"
        reader.emit_view(
            torch.ops.aten.as_strided.default, clone, [size, stride, offset], name, base
        )
        return name
    if f"_{argument}_slice_dim" in kwargs:
        dim, start, end = (
            kwargs.pop(f"_{argument}_slice_{part}") for part in ("dim", "start", "end")
        )
        name = f"{node.name}.{argument}"
        reader.emit_view(torch.ops.aten.slice.Tensor, clone, [dim, start, end, 1], name, base)
        return name
    return clone


def _operator_results(node: fx.Node, op) -> tuple[list[str], list[Any]]:

    count = len(graph_compat.schema(op).returns)
    value = node.meta.get("val")
    items = list(value)[:count] if isinstance(value, list | tuple) else [value][:count]
    names = [
        f"{node.name}.{i}" if isinstance(item, torch.Tensor) else "" for i, item in enumerate(items)
    ]
    return names, [type_of(item) if isinstance(item, torch.Tensor) else None for item in items]


def _add_auto_functionalized_v1(reader: Any, node: fx.Node) -> None:
    op = node.args[0]
    mutable, _ = auto_functionalize.get_mutable_args(op)
    values: dict[str, Any] = {}
    written = []
    for name, value in node.kwargs.items():
        if name in mutable and value is not None:
            if isinstance(value, list | tuple):
                raise Unsupported(f"node {node.name}: {op} changes a list of tensors")
            clone = _clone(reader, value, f"{node.name}.{name}")
            values[name] = ("%", clone)
            written.append(clone)
        else:
            values[name] = reader.argument(value)
    returned, types = _operator_results(node, op)
    mutated = [f"{node.name}.mutated{i}" for i in range(len(written))]
    reader.emit_mutation(node, op, values, returned, types, mutated)
    for i, after in enumerate(mutated):
        reader.rename_result(f"{node.name}.{_first_base(op) + i}", after)


def _add_python_call(reader: Any, node: fx.Node) -> None:
    """Any other higher-order operator: called as eager PyTorch would call it, with the GIL."""
    value = node.meta.get("val")
    # The gradient of flex attention returns the gradients of captured tensors in a list.
    items = value if isinstance(value, list | tuple) else [value]
    if not all(
        item is None or isinstance(item, torch.Tensor)
        for item in module_compat.pytree.tree_leaves(items)
    ):
        raise Unsupported(f"node {node.name}: {node.target} gives results that are not tensors")

    tensors: list[fx.Node] = []
    sizes: list[Any] = []

    def hole(arg: fx.Node) -> Any:
        if arg.op == "get_attr":
            found = reader.attribute(arg)
            if isinstance(found, torch.nn.Module):
                return lambda *_: found
        known = arg.meta.get("val")
        if isinstance(known, torch.Tensor):
            tensors.append(arg)
            place = len(tensors) - 1
            return lambda given, _: given[place]
        if isinstance(known, torch.SymInt):
            sizes.append(known)
            index = len(sizes) - 1
            return lambda _, numbers: numbers[index]
        raise Unsupported(f"node {node.name}: argument {arg.name} of {node.target} is not a tensor")

    args = fx.node.map_arg(node.args, lambda arg: _Hole(hole(arg)))
    kwargs = fx.node.map_arg(node.kwargs, lambda arg: _Hole(hole(arg)))

    def call(given: list[torch.Tensor], numbers: list[int]) -> list[torch.Tensor]:
        fill = lambda item: item.fill(given, numbers) if isinstance(item, _Hole) else item  # noqa: E731
        filled = module_compat.pytree.tree_map(
            fill, (args, kwargs), is_leaf=lambda x: isinstance(x, _Hole)
        )
        results = node.target(*filled[0], **filled[1])
        return [
            torch.empty(0) if result is None else result
            for result in module_compat.pytree.tree_leaves(results)
        ]

    key = next(_keys)
    _callables[key] = call
    names, types = reader.results_of(node, list(items))
    if not isinstance(value, list | tuple):
        names = [node.name if node.users else ""]
        reader.name_node(node)
    reader.emit_python_call(node, key, tensors, sizes, names, types)


class _Hole:
    """A place in the arguments that is filled at run time."""

    def __init__(self, fill) -> None:
        self.fill = fill
