"""Writes the calls that compute an ONNX graph as a graph of torch.fx."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torch_ort import _C
from torch_ort.onnx.functions import Row, control_flow, linear
from torch_ort.onnx.functions.types import (
    FUNCTION_DOMAIN,
    OPERATIONS,
    Dim,
    check_divisor,
    named_arguments,
    row_of,
    size_quotient,
    size_remainder,
)
from torch_ort.pytorch import graph_compat

# Where a node of torch.fx says which value of the file it gives.
VALUE_NAME = "onnx_value"

# Kinds of arguments that calls give by PyTorch's names.
_NAMED = (torch.dtype, torch.layout, torch.memory_format)

# The engine calls the CPU's own operator. PyTorch chooses that one of the device by this name.
_ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION = "scaled_dot_product_attention"


def _attention_arguments(
    query: Any, key: Any, value: Any, dropout: Any = 0.0, is_causal: Any = False,
    mask: Any = None, scale: Any = None,
) -> list[Any]:  # fmt: skip
    return [query, key, value, mask, dropout, is_causal, scale]


# This kernel believes the sizes that it is told. The other one asks the tensor.
_GROUP_NORM = "native_group_norm"


def _group_norm_arguments(
    x: Any, weight: Any, bias: Any, batch: Any, channels: Any, area: Any, groups: Any, epsilon: Any
) -> list[Any]:
    return [x, groups, weight, bias, epsilon]


@dataclass(frozen=True)
class Program:
    """What computes a graph. Values have numbers."""

    inputs: dict[int, str]
    outputs: list[int]
    initializers: dict[int, str]  # those of the file
    tensors: dict[int, torch.Tensor]  # of initializers, and of constants of the calls
    # Operator, overload, arguments, outputs, op and name of the node, its attributes if it is a
    # function (functions/), and what computes its bodies if it is a branch or a loop.
    calls: list[tuple[str, str, list[Any], list[int | None], str, str, dict, dict[str, Program]]]
    dims: dict[int, list[Dim]]  # of the values that have sizes with symbols
    names: dict[int, str]  # of values of the file
    is_body: bool  # of a branch or a loop
    # What is given beside the inputs: integers among these that are read as sizes, and, for a body,
    # symbols of the graph around it.
    symbols: list[str]
    # Of outputs: dtypes and sizes, 0 for one with symbols.
    types: list[tuple[str, list[int]]]

    @classmethod
    def of(cls, graph: _C.Graph) -> Program:
        """Ask the engine for the calls. Raises Unsupported and UserError, as `load_onnx` does."""
        return cls._read(_C.calls_of(graph), set(graph.initializer_names), is_body=False)

    @classmethod
    def _read(cls, found: dict[str, Any], of_file: set[str], is_body: bool) -> Program:
        """Read what csrc/python/bind_calls.cpp gives; what is not of the file is a constant."""
        tensors = {number: _tensor(*data) for number, *data in found["constants"]}
        initializers = {number: name for number, name in found["initializers"] if name in of_file}
        for number, name in initializers.items():
            if number not in tensors:
                raise _C.UserError(f"load_onnx: initializer '{name}': got no data")
        calls = [
            (*call, {name: cls._read(body, set(), is_body=True) for name, body in bodies.items()})
            for *call, bodies in found["calls"]
        ]
        return cls(
            dict(found["inputs"]), [number for number, _ in found["outputs"]], initializers,
            tensors, calls, found["dims"], found["names"], is_body, found["symbols"],
            found["types"],
        )  # fmt: skip


def _tensor(dtype: str, sizes: list[int], data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(sizes, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(sizes)


def write_graph(program: Program, paths: Mapping[int, str], root: nn.Module) -> fx.Graph:
    """Write a graph whose tensors are attributes of a module, by the paths of their numbers.

    Bodies of branches and loops become submodules of the root.

    Raises Unsupported for calls that are not of PyTorch's own operators, and for sizes that no
    input has.
    """
    return _Writer(program, paths, root).graph


def _is_impure(node: fx.Node) -> bool:
    """Tell whether a node counts although nobody reads it. No submodule of ours does."""
    return node.op != "call_module" and node.is_impure()


class Tracer(fx.Tracer):
    """Traces a module when it is unpickled.

    What is read of a buffer is no constant, and sizes are divided by calls, as they were before.
    """

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__(autowrap_functions=(size_quotient, size_remainder))


class _Writer:
    def __init__(self, program: Program, paths: Mapping[int, str], root: nn.Module) -> None:
        self.graph = fx.Graph(tracer_cls=Tracer)
        self._program = program
        self._paths = paths
        self._root = root
        self._values: dict[int, fx.Node] = {}
        self._symbols: dict[str, fx.Node] = {}
        self._biases: dict[str, str] = {}  # of linear layers, by their paths
        self._known_device: fx.Node | None = None
        taken: set[str] = set()
        of_inputs = set(program.symbols) & set(program.inputs.values())
        for name in [each for each in program.symbols if each not in of_inputs]:
            self._symbols[name] = self.graph.placeholder(_identifier(name, taken))
        for number, name in program.inputs.items():
            self._values[number] = self.graph.placeholder(_identifier(name, taken))
        for number, name in program.inputs.items():
            self._bind_symbols(number)
            if name in of_inputs:  # an integer that is read as a size
                read = self.graph.call_function(control_flow.integer, (self._values[number],))
                read.meta["is_wrapped"] = True
                self._symbols[name] = read
        for call in program.calls:
            self._write(*call)
        outputs = [self._value(number) for number in program.outputs]
        is_one = len(outputs) == 1 and not program.is_body
        self.graph.output(outputs[0] if is_one else tuple(outputs))
        for number, value in self._values.items():
            if number in program.names and value.op != "get_attr":
                value.meta[VALUE_NAME] = program.names[number]
        self.graph.eliminate_dead_code(_is_impure)
        self.graph.lint()

    def _bind_symbols(self, number: int) -> None:
        for place, dim in enumerate(self._program.dims.get(number, [])):
            if isinstance(dim, tuple) and dim[0] == "symbol" and dim[1] not in self._symbols:
                self._symbols[dim[1]] = self.graph.call_function(
                    torch.ops.aten.sym_size.int, (self._values[number], place)
                )

    def _value(self, number: int) -> fx.Node:
        if number not in self._values:
            self._values[number] = self.graph.get_attr(self._paths[number])
        return self._values[number]

    def _size(self, dim: Dim) -> Any:
        if isinstance(dim, int):
            return dim
        if dim[0] == "symbol":
            if dim[1] not in self._symbols:
                raise _C.Unsupported(f"load_onnx: size '{dim[1]}': no input has it")
            return self._symbols[dim[1]]
        operation, left, right = dim
        if operation in ("floordiv", "mod"):
            check_divisor(right)  # one that the file tells is refused as it is loaded
        return self.graph.call_function(
            OPERATIONS[operation], (self._size(left), self._size(right))
        )

    def _argument(self, given: Any, kind: str) -> Any:
        match given:
            case ("value", number):
                return self._value(number)
            case ("size", dim):
                return self._size(dim)
            case list():
                return [self._argument(each, kind) for each in given]
            case str() if kind == "device" and given == "cpu":
                return self._device()
            case str() if isinstance(getattr(torch, given, None), _NAMED):
                return getattr(torch, given)
        return given

    def _device(self) -> Any:
        """Write the device of the model: that of its first tensor."""
        if self._known_device is None:
            numbers = list(self._program.inputs) or list(self._paths)
            if not numbers:
                return "cpu"
            tensor = self._value(numbers[0])
            self._known_device = self.graph.call_function(getattr, (tensor, "device"))
        return self._known_device

    def _write(
        self, name: str, overload: str, args: list[Any], outputs: list[int | None], op: str,
        node: str, attributes: dict[str, Any], bodies: dict[str, Program],
    ) -> None:  # fmt: skip
        namespace, _, short = name.partition("::")
        if "carried" in attributes:
            self._write_control_flow(name, args, outputs, attributes["carried"], bodies)
            return
        if namespace.startswith(FUNCTION_DOMAIN):
            self._write_function(namespace, short, args, outputs, attributes)
            return
        if namespace != "aten":
            raise _C.Unsupported(f"load_onnx: {op} (node '{node}'): no operators of PyTorch do it")
        if short == _ATTENTION_ON_CPU:
            short, args = _ATTENTION, _attention_arguments(*args)
            outputs = outputs[:1]
        if short == _GROUP_NORM:
            if any(each is not None for each in outputs[1:]):
                raise _C.Unsupported(f"load_onnx: {name}: statistics are read (node '{node}')")
            short, args, outputs = "group_norm", _group_norm_arguments(*args), outputs[:1]
        function = getattr(getattr(torch.ops.aten, short), overload or "default")
        schema = graph_compat.schema(function)
        written = [
            self._argument(given, argument.name)
            for given, argument in zip(args, schema.arguments, strict=False)
        ]
        positional = sum(not argument.kwarg_only for argument in schema.arguments)
        named = {
            argument.name: given
            for given, argument in zip(
                written[positional:], schema.arguments[positional:], strict=False
            )
        }
        result = self.graph.call_function(function, tuple(written[:positional]), named)
        is_one = len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TensorType)
        self._take(result, outputs, is_one)

    def _write_function(
        self, domain: str, name: str, args: list[Any], outputs: list[int | None],
        attributes: dict[str, Any],
    ) -> None:  # fmt: skip
        words, row = row_of(domain, name)
        named = named_arguments(words, row, attributes, [each is not None for each in outputs])
        positional = [self._argument(given, "") for given in args]
        while positional and positional[-1] is None:
            positional.pop()
        row.check_inputs(words, positional)
        if row.is_module:
            result = self._call_module(row, name, positional, named)
        else:
            result = self.graph.call_function(row.function, tuple(positional), named)
            # torch.fx traces the module when it is unpickled, and must not look into the function.
            result.meta["is_wrapped"] = True
        self._take(result, outputs, row.gives_one)

    def _call_module(
        self, row: Row, name: str, positional: Sequence[Any], named: Mapping[str, Any]
    ) -> fx.Node:
        made = row.module(positional, named)
        if linear.is_linear(made):
            path = self._add_linear(made, *positional[1:])
        else:
            path = self._add_module(name.lower(), made)
        tensors = [None if i in row.numbers else given for i, given in enumerate(positional)]
        while tensors and tensors[-1] is None:
            tensors.pop()
        return self.graph.call_module(path, tuple(tensors))

    def _add_linear(self, made: nn.Module, weight: fx.Node, *biases: fx.Node) -> str:
        """Make a product a submodule beside its weight; gives its path.

        It serves all nodes with the same weight and bias.
        """
        bias = str(biases[0].target) if biases else ""
        path = linear.path_of(str(weight.target))
        parent, _, last = path.rpartition(".")
        owner = self._root.get_submodule(parent)
        there = getattr(owner, last, None)
        is_same = type(there) is type(made) and str(there) == str(made)
        if is_same and self._biases[path] == bias:
            return path
        if there is not None:
            return self._add_module("linear", made)
        owner.add_module(last, made)
        self._biases[path] = bias
        return path

    def _add_module(self, word: str, module: nn.Module) -> str:
        """Make a module a submodule of the root; gives its path."""
        count = 1
        while hasattr(self._root, f"{word}_{count}"):
            count += 1
        self._root.add_module(f"{word}_{count}", module)
        return f"{word}_{count}"

    def _write_control_flow(
        self, name: str, args: list[Any], outputs: list[int | None], carried: int,
        bodies: dict[str, Program],
    ) -> None:  # fmt: skip
        given = [self._argument(each, "") for each in args]
        function: Callable[..., Any]
        arguments: tuple[Any, ...]
        if name == "torch_ort::if":
            function = control_flow.if_else
            branches = (bodies["then_branch"], bodies["else_branch"])
            arguments = (
                given[0], *map(self._body, branches), *map(self._symbols_of, branches), given[1:]
            )  # fmt: skip
        else:
            function = control_flow.loop
            body = bodies["body"]
            first, second = 2, 2 + carried  # of what is carried, and of outer values
            arguments = (
                given[0], given[1], self._body(body), self._symbols_of(body),
                tuple(given[first:second]), tuple(given[second:]),
                tuple((dtype, tuple(sizes)) for dtype, sizes in body.types[1 + carried :]),
            )  # fmt: skip
        result = self.graph.call_function(function, arguments)
        result.meta["is_wrapped"] = True
        self._take(result, outputs, is_one=False)

    def _body(self, body: Program) -> fx.Node:
        """Write a body as a submodule of its own."""
        root = nn.Module()
        paths = {number: f"constant_{number}" for number in body.tensors}
        for number, path in paths.items():
            root.register_buffer(path, body.tensors[number], persistent=False)
        module = fx.GraphModule(root, write_graph(body, paths, root))
        return self.graph.get_attr(self._add_module("body", module))

    def _symbols_of(self, body: Program) -> tuple[Any, ...]:
        names = [name for name in body.symbols if name not in body.inputs.values()]
        return tuple(self._size(("symbol", name)) for name in names)

    def _take(self, result: fx.Node, outputs: list[int | None], is_one: bool) -> None:
        """Take the outputs of a call out of its result, which is a tensor or a tuple of them."""
        for place, number in enumerate(outputs):
            if number is None:
                continue
            self._values[number] = (
                result if is_one else self.graph.call_function(operator.getitem, (result, place))
            )
            self._bind_symbols(number)


# Names that the code of a module uses.
_OF_CODE = frozenset({"self", "torch", "torch_ort", "device", "getattr", "inf", "nan", "NoneType"})


def _identifier(name: str, taken: set[str]) -> str:
    """Give a name of a parameter of forward, like that of an input and unlike all others."""
    base = re.sub(r"\W", "_", name)
    if not base or base[0].isdigit() or keyword.iskeyword(base) or base in _OF_CODE:
        base = f"input_{base}"
    found, count = base, 1
    while found in taken:
        count += 1
        found = f"{base}_{count}"
    taken.add(found)
    return found
