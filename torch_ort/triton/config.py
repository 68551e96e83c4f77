"""Which regions Triton gets: the JSON file of ORTMODULE_TRITON_CONFIG_FILE.

    {"ops": {"Add": {"versions": [13, 14]},
             "ReduceSum": {"versions": [13], "conditions": {"axes": "[-1]"}},
             "Identity": {"versions": [13], "is_no_op": True},
             "FastGelu": {"domain": "com.microsoft", "versions": [1]}},
     "initializer": "scalar", "min_nodes": 2}

Words of Python such as True are read as well. A region is Triton's if each of its nodes is one of
`ops`. An operator that the engine has taken apart, such as Softmax, is named by itself too, and
stands for the nodes that it was taken apart into.
"""

from __future__ import annotations

import ast
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx.helper
import onnx.numpy_helper

from torch_ort import _C
from torch_ort._C import UserError

_KEYS = {"ops", "initializer", "min_nodes"}
_KEYS_OF_OP = {"versions", "domain", "is_no_op", "conditions", "ignore_min_nodes"}
_CONDITIONS = {"axis", "axes"}
INITIALIZERS = ("none", "scalar", "all")


@dataclass(frozen=True)
class Operator:
    """An operator that kernels of Triton may have."""

    versions: tuple[int, ...]
    domain: str = ""
    is_no_op: bool = False
    ignore_min_nodes: bool = False
    conditions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """What the file says. Without `ops`, all operators are Triton's."""

    ops: Mapping[str, Operator] | None = None
    initializer: str = "scalar"
    min_nodes: int = 1

    def takes(self, body: _C.Graph) -> bool:
        """Tell whether the region with this body is Triton's."""
        if self == Config():
            return True
        opset = _C.required_opset(body)
        graph = onnx.load_from_string(body.to_onnx(opset)).graph
        is_scalar = all(math.prod(each.dims) == 1 for each in _numbers(graph))
        if self.initializer == "none" and _numbers(graph):
            return False
        if self.initializer == "scalar" and not is_scalar:
            return False
        if self.ops is None:
            return len(graph.node) >= self.min_nodes
        found = [self._operator(node, graph, opset) for node in graph.node]
        if None in found:
            return False
        count = sum(not each.is_no_op for each in found if each is not None)
        return count >= self.min_nodes or any(each.ignore_min_nodes for each in found if each)

    def _operator(
        self, node: onnx.NodeProto, graph: onnx.GraphProto, opset: int
    ) -> Operator | None:
        """Give the operator that a node is, or is a part of; None if there is none."""
        assert self.ops is not None
        for name, operator in self.ops.items():
            is_it = node.op_type == name and node.domain == operator.domain
            if is_it and _has_version(name, operator, opset) and _meets(node, graph, operator):
                return operator
            if node.name.startswith(f"{_snake(name)}_"):
                return operator
        return None


def _numbers(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """List the constants of a body that are numbers to compute with, and not axes or shapes."""
    return [each for each in graph.initializer if each.data_type != onnx.TensorProto.INT64]


def _axes(node: onnx.NodeProto, graph: onnx.GraphProto, name: str) -> list[int]:
    """Give the axes of a node, as its attribute or its constant input has them."""
    for attribute in node.attribute:
        if attribute.name == name:
            value = onnx.helper.get_attribute_value(attribute)
            return list(value) if isinstance(value, list) else [value]
    for each in graph.initializer:
        if len(node.input) > 1 and each.name == node.input[1]:
            return [int(axis) for axis in onnx.numpy_helper.to_array(each).reshape(-1)]
    return [-1] if name == "axis" else []


def _rank(node: onnx.NodeProto, graph: onnx.GraphProto) -> int:
    for each in (*graph.input, *graph.value_info):
        if each.name == node.input[0]:
            return len(each.type.tensor_type.shape.dim)
    return 0


def _snake(name: str) -> str:
    """LogSoftmax -> log_softmax."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _has_version(name: str, operator: Operator, opset: int) -> bool:
    """Tell whether a listed version is one that a node valid from `opset` on may have."""
    if operator.domain != "":
        return True  # the engine writes one version of such operators
    newest = onnx.defs.onnx_opset_version()
    return any(_since(name, each) in operator.versions for each in range(opset, newest + 1))


@functools.cache
def _since(name: str, opset: int) -> int | None:
    try:
        return onnx.defs.get_schema(name, opset, "").since_version
    except onnx.defs.SchemaError:
        return None


def _meets(node: onnx.NodeProto, graph: onnx.GraphProto, operator: Operator) -> bool:
    """Tell whether the axes of a node, all constant in a region, are those that are asked for."""
    rank = _rank(node, graph)
    for name, wanted in operator.conditions.items():
        axes = _axes(node, graph, name)
        if wanted == "single" and len(axes) != 1:
            return False
        if wanted not in ("single", "constant"):
            literal = ast.literal_eval(wanted)
            literals = literal if isinstance(literal, list) else [literal]
            if rank == 0 or {a % rank for a in literals} != {a % rank for a in axes}:
                return False
    return True


def read(path: str) -> Config:
    """Read a file; the default for an empty path.

    Raises UserError that names the path, and the key, of what cannot be read.
    """
    if not path:
        return Config()
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(f"ORTMODULE_TRITON_CONFIG_FILE: {path}: {error.strerror}") from error
    return _Reader(path).config(_parsed(path, text))


def _parsed(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            raise UserError(f"ORTMODULE_TRITON_CONFIG_FILE: {path}: {error}") from error


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path

    def _fail(self, key: str, got: Any, want: str) -> UserError:
        return UserError(
            f"ORTMODULE_TRITON_CONFIG_FILE: {self._path}: {key}: got {got!r}, want {want}"
        )

    def _keys(self, key: str, given: Any, known: set[str]) -> None:
        if not isinstance(given, dict):
            raise self._fail(key or "the file", given, "a dict")
        for name in given:
            if name not in known:
                where = f"{key}.{name}" if key else name
                raise self._fail(where, given[name], f"one of {', '.join(sorted(known))}")

    def config(self, given: Any) -> Config:
        self._keys("", given, _KEYS)
        initializer, least = given.get("initializer", "scalar"), given.get("min_nodes", 2)
        if initializer not in INITIALIZERS:
            raise self._fail("initializer", initializer, ", ".join(INITIALIZERS))
        if not isinstance(least, int) or isinstance(least, bool) or least < 1:
            raise self._fail("min_nodes", least, "an integer of 1 or more")
        ops = given.get("ops")
        if not isinstance(ops, dict):
            raise self._fail("ops", ops, "a dict of operators")
        return Config({name: self._operator(name, each) for name, each in ops.items()},
                      initializer, least)  # fmt: skip

    def _operator(self, name: str, given: Any) -> Operator:
        key = f"ops.{name}"
        self._keys(key, given, _KEYS_OF_OP)
        versions = given.get("versions")
        if not isinstance(versions, list) or not all(isinstance(v, int) for v in versions):
            raise self._fail(f"{key}.versions", versions, "a list of integers")
        for flag in ("is_no_op", "ignore_min_nodes"):
            if not isinstance(given.get(flag, False), bool):
                raise self._fail(f"{key}.{flag}", given[flag], "a bool")
        if not isinstance(given.get("domain", ""), str):
            raise self._fail(f"{key}.domain", given["domain"], "a string")
        conditions = given.get("conditions", {})
        self._keys(f"{key}.conditions", conditions, _CONDITIONS)
        for axis, wanted in conditions.items():
            if not _is_condition(wanted):
                raise self._fail(
                    f"{key}.conditions.{axis}", wanted,
                    'an axis such as "-1" or "[-1]", "single" or "constant"',
                )  # fmt: skip
        return Operator(
            tuple(versions), given.get("domain", ""), given.get("is_no_op", False),
            given.get("ignore_min_nodes", False), conditions,
        )  # fmt: skip


def _is_condition(wanted: Any) -> bool:
    if wanted in ("single", "constant"):
        return True
    try:
        literal = ast.literal_eval(wanted)
    except (ValueError, SyntaxError):
        return False
    axes = literal if isinstance(literal, list) else [literal]
    return all(isinstance(axis, int) and not isinstance(axis, bool) for axis in axes)
