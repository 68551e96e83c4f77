"""The table of ONNX's operators that are functions of PyTorch's, and how a family registers one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx
import torch

from torch_ort import _C
from torch_ort.core.dtypes import dtype_of_number

# The domain of the operators that ONNX Runtime adds.
MICROSOFT = "com.microsoft"
# The domain of operators of classical machine learning.
ML = "ai.onnx.ml"
# In the place of a domain: standard operators that compute otherwise while a module is trained.
BY_MODE = "by_mode"
# The same for products with a matrix of the file.
LINEAR = "linear"

# Dims of a tensor, where None is one that nothing tells before the function runs.
Dims = list[Any]


@dataclass(frozen=True)
class Row:
    """An operator as a function.

    The function takes the inputs of the node by position, None for one that is left out, and the
    attributes by their names in ONNX. It gives a tensor, or a tuple of as many as the operator may
    have. A parameter `wanted` gets a flag for each output of the node, and `opset` the version of
    the operator's domain.

    Or it is a class of modules, made with a mapping from positions to numbers and with the
    attributes, and called with the inputs.

    Attributes:
        function: The function, or the class.
        numbers: Positions of inputs that it takes as lists of numbers: constants and sizes.
        when: Whether the function computes a node. It does so for all unless this is given: for
            operators of which the engine computes other forms itself.
        draws: Whether it draws random numbers.
        types: Gives dtype and dims of the outputs for inputs on the meta device, for a function
            that looks at numbers in tensors, or takes long there. All others are run there.
    """

    function: Callable[..., Any]
    numbers: tuple[int, ...] = ()
    when: Callable[[onnx.NodeProto], bool] | None = None
    draws: bool = False
    types: Callable[..., list[tuple[Any, Dims]]] | None = None

    @property
    def is_module(self) -> bool:
        """Whether the operator is a class of modules."""
        return isinstance(self.function, type)

    def module(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> torch.nn.Module:
        """Make the module of a node, from its inputs and from what it takes by name."""
        numbers = {slot: arguments[slot] for slot in self.numbers if slot < len(arguments)}
        return self.function(numbers, **named)

    @property
    def attributes(self) -> set[str]:
        """The names of the attributes that the function takes."""
        parameters = inspect.signature(self.function).parameters.values()
        named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        return named - {"wanted", "opset"}

    @property
    def gives_one(self) -> bool:
        """Whether the function gives a tensor, rather than a tuple."""
        call = self.function.forward if self.is_module else self.function  # type: ignore[attr-defined]
        return inspect.signature(call).return_annotation == "Tensor"

    def check_inputs(self, words: str, inputs: Sequence[Any]) -> None:
        """Raise UserError if a node has too many inputs, or lacks one that it must have."""
        call = self.function.forward if self.is_module else self.function  # type: ignore[attr-defined]
        parameters = [p for p in inspect.signature(call).parameters.values() if p.name != "self"]
        if parameters and parameters[0].kind is parameters[0].VAR_POSITIONAL:
            wanted, most = [parameters[0]] * len(inputs), len(inputs)
        else:
            wanted = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            most = len(wanted)
        if len(inputs) > most:
            raise _C.UserError(f"{words}: inputs: got {len(inputs)}, want at most {most}")
        for i, parameter in enumerate(wanted):
            is_optional = parameter.default is None or "None" in str(parameter.annotation)
            if not is_optional and (i >= len(inputs) or inputs[i] is None):
                raise _C.UserError(f"{words}: input {i}, '{parameter.name}': got none, want one")

    def takes(self, name: str) -> bool:
        """Tell whether the function has a parameter."""
        return name in inspect.signature(self.function).parameters


TABLE: dict[tuple[str, str], Row] = {}

F = TypeVar("F", bound=Callable[..., Any])


def of_onnx(*names: str, domain: str = "", **facts: Any) -> Callable[[F], F]:
    """Register a function as some operators of ONNX; `facts` are fields of its `Row`."""

    def register(function: F) -> F:
        for name in names:
            assert (domain, name) not in TABLE, f"two functions for {domain} {name}"
            TABLE[domain, name] = Row(function, **facts)
        return function

    return register


def has_attribute(name: str, *values: Any) -> Callable[[onnx.NodeProto], bool]:
    """Give a condition for `Row.when`: the node has the attribute, with one of some values."""

    def condition(node: onnx.NodeProto) -> bool:
        found = [each for each in node.attribute if each.name == name]
        return bool(found) and (not values or onnx.helper.get_attribute_value(found[0]) in values)

    return condition


def any_of(*conditions: Callable[[onnx.NodeProto], bool]) -> Callable[[onnx.NodeProto], bool]:
    """Give a condition for `Row.when`: one of several holds."""
    return lambda node: any(condition(node) for condition in conditions)


def has_outputs(*slots: int) -> Callable[[onnx.NodeProto], bool]:
    """Give a condition for `Row.when`: the node has one of these outputs."""

    def condition(node: onnx.NodeProto) -> bool:
        return any(slot < len(node.output) and node.output[slot] for slot in slots)

    return condition


def has_inputs(slots: Collection[int]) -> Callable[[onnx.NodeProto], bool]:
    """Give a condition for `Row.when`: the node has one of these inputs."""

    def condition(node: onnx.NodeProto) -> bool:
        return any(slot < len(node.input) and node.input[slot] for slot in slots)

    return condition


def dtype_of(number: int) -> torch.dtype:
    """Give the dtype that has a number in ONNX. Raises Unsupported if PyTorch has none."""
    dtype = dtype_of_number(number)
    if dtype is None:
        raise _C.Unsupported(f"dtype {number} of ONNX: PyTorch has none, or cannot compute with it")
    return dtype
