"""Reads an FX graph of ATen calls into the engine: each node becomes one call.

Sizes are not computed by nodes: every symbolic integer is an expression over the symbols of the
inputs, so
`sym_size`, `operator.mul` and their like leave no trace.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.core.user_code import blaming
from torch_ort.functions import describe as functions
from torch_ort.pytorch.graph_compat import (
    HigherOrderOperator,
    OpOverload,
    is_object,
    recompute_policy,
    schema,
)
from torch_ort.read import higher_order
from torch_ort.read.descriptions import line_of, origin_of, type_of
from torch_ort.record import bodies
from torch_ort.rules.symbols import (
    Symbolic,
    expression_text,
    is_known_size,
    size,
    size_hint,
    symbol_name,
)

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MEMORY_FORMATS = {
    torch.contiguous_format: "contiguous_format",
    torch.preserve_format: "preserve_format",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
}


class FxReader:
    """Feeds the nodes of one FX graph to `_C.Reader`, in the order that the caller chooses."""

    def __init__(self, module: fx.GraphModule, name: str, max_opset: int) -> None:
        self.started = time.perf_counter()
        self.module = module
        self.reader = _C.Reader(name, max_opset)
        self.constants: dict[str, torch.Tensor] = {}
        self.tensor_inputs: list[int] = []  # positions among the placeholders
        self.symbol_inputs: list[int] = []
        self.functions: list[Any] = []  # calls of torch.autograd.Function, which the graph keeps
        self._names: dict[fx.Node, str] = {}

    def add_placeholders(self, nodes: Iterable[fx.Node]) -> None:
        """Declare graph inputs. Raises Unsupported unless each is a tensor, an integer or None."""
        for position, node in enumerate(nodes):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                self.reader.add_input(self._name(node), type_of(value))
                self.tensor_inputs.append(position)
                self._add_hints(value.shape)
            elif isinstance(value, torch.SymInt):
                name = symbol_name(value)
                if name is not None:
                    self.reader.add_symbol_input(name)
                    self.symbol_inputs.append(position)
                    self._add_hints([value])
            elif is_object(value):
                pass  # it may go through the graph; a call that takes it is refused
            elif value is not None and not isinstance(value, int | float | bool):
                raise Unsupported(
                    f"input {node.name}: got {type(value).__name__}, want a tensor or an integer"
                )

    def _add_hints(self, sizes: Iterable[int | torch.SymInt]) -> None:
        for each in sizes:
            name = symbol_name(each) if isinstance(each, torch.SymInt) else None
            hint = None if name is None else size_hint(each)
            if hint is not None:
                self.reader.add_size_hint(name, hint)

    def add_nodes(self, nodes: Iterable[fx.Node]) -> None:
        """Add calls and constants."""
        for node in nodes:
            if node.op == "get_attr":
                self._add_constant(node)
            elif node.op == "call_function":
                with blaming(str(node.target), line_of(node)):
                    self._add_call(node)
            elif node.op != "placeholder":
                raise Unsupported(f"node {node.name}: got {node.op}, want a call of a function")

    def add_yield_nodes(self, outputs: list[str], tangents: Iterable[fx.Node]) -> None:
        """Add the YieldOp between forward and backward: outputs by name, and their gradients."""
        self.reader.add_yield(
            outputs, [(self._name(node), type_of(node.meta["val"])) for node in tangents]
        )

    def value_name(self, node: fx.Node) -> str:
        """Give the name that the engine knows a tensor by."""
        if node not in self._names:
            raise Unsupported(f"node {node.name}: its value is not a tensor, want a tensor")
        return self._names[node]

    def add_size_as_tensor(self, name: str, value: Any, origin: str = "") -> None:
        """Add a 0-d int64 CPU tensor with the value of a size, so that it can leave the graph."""
        self._emit(
            torch.ops.aten.scalar_tensor.default,
            [self._argument(value), "int64", None, "cpu", None],
            [name], [("int64", [], [], "cpu")], name, origin,
        )  # fmt: skip

    # ---- used by higher_order.py

    def argument(self, value: Any) -> Any:
        """Give an argument as `_C.Reader.add_call` takes it."""
        return self._argument(value)

    def attribute(self, node: fx.Node) -> Any:
        """Give the value of a `get_attr` node."""
        value = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value

    def name_node(self, node: fx.Node) -> None:
        """Let a node that makes one tensor be known by its own name."""
        self._name(node)

    def rename_result(self, name: str, source: str) -> None:
        """Let `name` be another name of the value `source`."""
        self.reader.add_alias(name, source)

    def add_private_clone(self, base: fx.Node, name: str) -> None:
        """Add a row-major copy that a later call may write into."""
        value = base.meta["val"]
        self.reader.add_private_clone(self.value_name(base), name, type_of(value))

    def copy_after_mutation(self, source: str, name: str, base: fx.Node) -> None:
        """Add a copy of a clone that was written into."""
        self.reader.add_private_clone(source, name, type_of(base.meta["val"]))

    def emit_view(
        self, target, source: str, arguments: list[Any], name: str, base: fx.Node
    ) -> None:
        """Add a view of a clone; its type is known only when it runs."""
        self._emit(
            target,
            [("%", source), *map(self._argument, arguments)],
            [name],
            [None],
            name,
            origin_of(base),
        )

    def emit_mutation(
        self, node: fx.Node, target, values: dict[str, Any], names: list[str], types: list[Any],
        mutated: list[str],
    ) -> None:  # fmt: skip
        """Add a call that writes into arguments; `mutated` names them as they are afterwards."""
        arguments = []
        for argument in schema(target).arguments:
            default = argument.default_value if argument.has_default_value() else None
            arguments.append(values.get(argument.name, default))
        self._emit(target, arguments, [*names, *mutated], [*types, *([None] * len(mutated))],
                   node.name, origin_of(node), node)  # fmt: skip

    def emit_python_call(
        self, node: fx.Node, key: int, tensors: list[fx.Node], sizes: list[Any], names: list[str],
        types: list[Any],
    ) -> None:  # fmt: skip
        """Add a call back into Python."""
        self._emit(
            torch.ops.torch_ort.call_python.default,
            [key, self._argument(tensors), self._argument(sizes)],
            names, types, node.name, origin_of(node), node,
        )  # fmt: skip

    def emit_with_attributes(self, node: fx.Node, attributes: dict[str, Any]) -> None:
        """Add a call whose node says more than the arguments of its operator."""
        names, types = self.results_of(node, node.meta["val"])
        form = schema(node.target)
        arguments = dict(
            zip((a.name for a in form.arguments), self._bound_arguments(node), strict=True)
        )
        arguments |= {name: self._argument(value) for name, value in attributes.items()}
        self.reader.add_call(
            form.name, "", list(arguments), list(arguments.values()), names, types, node.name,
            origin_of(node), *recompute_policy(node), "",
        )  # fmt: skip

    def _name(self, node: fx.Node) -> str:
        return self._names.setdefault(node, node.name)

    def _add_constant(self, node: fx.Node) -> None:
        value = self.attribute(node)
        if isinstance(value, torch.Tensor):
            self.reader.add_constant(self._name(node), type_of(value))
            self.constants[node.name] = value
        # Sub-modules are arguments of higher-order operators, which read them.

    def _add_call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            path = _path(node)
            if isinstance(value, torch.Tensor):
                self._names[node] = path
            return
        if isinstance(value, torch.SymFloat):
            raise Unsupported(f"node {node.name}: a data-dependent float ({origin_of(node)})")
        if isinstance(value, _SYMBOLIC):
            if node.target is torch.ops.aten._local_scalar_dense.default:
                self._add_read_back(node, value)
            return
        if isinstance(node.target, OpOverload) and node.target.namespace == "profiler":
            return  # marks of record_function, which each step of the engine has itself
        if node.target in bodies.OPS:
            self._add_control_flow(node)
            return
        if isinstance(node.target, HigherOrderOperator):
            higher_order.add_node(self, node)
            return
        if not isinstance(node.target, OpOverload):
            if not _has_tensor(value):
                return
            raise Unsupported(
                f"node {node.name}: a call of {node.target}, which is not an operator"
            )
        if functions.is_python_op(node.target):
            functions.add_node(self, node)
            return
        names, types = self.results_of(node, value)
        target, arguments = _WITH_MEMORY.get(node.target, node.target), self._bound_arguments(node)
        if node.target is torch.ops.aten._conj.default and isinstance(node.args[0], complex):
            # A number where the operator takes a tensor becomes a 0-d tensor.
            target = torch.ops.aten.scalar_tensor.default
            form = (value.dtype, None, value.device, None)
            arguments = [node.args[0].conjugate(), *map(self._argument, form)]
        self._emit(target, arguments, names, types, node.name, origin_of(node), node)

    def _add_control_flow(self, node: fx.Node) -> None:
        inputs, parts = node.args
        read = [
            (name, self._read_body(part, f"{node.name}_{name}")) for name, part in parts.items()
        ]
        names, types = self.results_of(node, node.meta["val"])
        self.reader.add_control_flow(
            bodies.OPS[node.target], [self._argument(value) for value in inputs], read, names,
            types, node.name, origin_of(node),
        )  # fmt: skip

    def _read_body(self, body: bodies.Body, name: str) -> Any:
        outer, self.reader = self.reader, self.reader.body(name)
        try:
            *nodes, output = body.graph.nodes
            for node in nodes:
                if node.op == "placeholder":
                    self.reader.add_input(self._name(node), type_of(node.meta["val"]))
            self.add_nodes(nodes)
            self.reader.set_outputs([self.value_name(node) for node in output.args[0]])
            return self.reader
        finally:
            self.reader = outer

    def _add_read_back(self, node: fx.Node, value: Any) -> None:
        name = symbol_name(value) if isinstance(value, torch.SymInt) else None
        if name is None:
            raise Unsupported(
                f"node {node.name}: .item() of a tensor that is not integer ({origin_of(node)})"
            )
        arguments = self._bound_arguments(node)
        self._emit(node.target, arguments, [], [None], node.name, origin_of(node), node, name)

    def results_of(self, node: fx.Node, value: Any) -> tuple[list[str], list[tuple | None]]:
        """Name the results of a node; "" where nothing reads one."""
        if value is None:
            return [], []
        if isinstance(value, torch.Tensor):
            return [self._name(node) if node.users else ""], [type_of(value)]
        read = {_path(user) for user in _items(node)}
        names, types = [], []
        for path, item in _flat(node.name, value):
            is_tensor = isinstance(item, torch.Tensor)
            # Readers of a size compute it from the sizes that it is made of.
            if item is not None and not is_tensor and not is_known_size(item):
                raise Unsupported(f"node {node.name}: result {path} is not a tensor")
            names.append(path if path in read and is_tensor else "")
            types.append(type_of(item) if is_tensor else None)
        return names, types

    def _bound_arguments(self, node: fx.Node) -> list[Any]:
        """All arguments in the order of the schema, defaults filled in."""
        arguments = schema(node.target).arguments
        bound = []
        for position, argument in enumerate(arguments):
            if position < len(node.args):
                value = node.args[position]
            elif argument.name in node.kwargs:
                value = node.kwargs[argument.name]
            else:
                value = argument.default_value if argument.has_default_value() else None
            bound.append(self._argument(value))
        return bound

    def _argument(self, value: Any) -> Any:
        """A plain value that `_C.Reader.add_call` takes."""
        if isinstance(value, fx.Node):
            known = value.meta.get("val")
            if isinstance(known, _SYMBOLIC):
                return self._argument(known)
            if isinstance(known, int | float | bool) and value not in self._names:
                return known
            return ("%", self.value_name(value))
        if isinstance(value, Symbolic):
            value = value.size
        if isinstance(value, torch.SymInt | torch.SymBool):
            text = size(value) if isinstance(value, torch.SymInt) else _condition(value)
            return text if isinstance(text, int) else ("#", text)
        if isinstance(value, torch.SymFloat):
            raise Unsupported(f"argument {value}: a float that depends on data or sizes")
        if isinstance(value, list | tuple):
            return [self._argument(item) for item in value]
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return str(value)
        if isinstance(value, torch.layout):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.memory_format):
            return _MEMORY_FORMATS[value]
        if value is None or isinstance(value, bool | int | float | complex | str):
            return value
        raise Unsupported(f"argument of type {type(value).__name__}, which a graph cannot hold")

    def _emit(
        self, target: Callable, arguments: list[Any], names: list[str], types: list[tuple | None],
        name: str, origin: str, node: fx.Node | None = None, binds_symbol: str = "",
    ) -> None:  # fmt: skip
        form = schema(target)
        overload = "" if form.overload_name in ("", "default") else form.overload_name
        policy, checkpoint = recompute_policy(node) if node is not None else ("", -1)
        self.reader.add_call(
            form.name, overload, [argument.name for argument in form.arguments], arguments,
            names, types, name, origin, policy, checkpoint, binds_symbol,
        )  # fmt: skip


# Zero tensors for which PyTorch allocates no memory. Kernels that the engine calls would read it.
_WITH_MEMORY = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}


def _path(node: fx.Node) -> str:
    """Name of an item of a node with several results: `split.1`, `halves.0.1`."""
    source, index = node.args
    return f"{_path(source) if source.target is operator.getitem else source.name}.{index}"


def _items(node: fx.Node) -> list[fx.Node]:
    """All getitem nodes under a node."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items + [inner for item in items for inner in _items(item)]


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [pair for i, item in enumerate(value) for pair in _flat(f"{name}.{i}", item)]
    return [(name, value)]


def _condition(value: torch.SymBool) -> int | str:
    recorded = _C.condition_text(value)
    if recorded is not None:
        return recorded
    text = expression_text(value.node.expr)
    return int(text) if text in ("0", "1") else text


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)
