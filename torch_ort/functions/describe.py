"""The attributes of PythonOp and PythonOpGrad, as ONNX Runtime Training writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_ort._C import Unsupported
from torch_ort.functions.arguments import Hole
from torch_ort.functions.call import BackwardCall, FunctionCall, call_of

_KINDS = ((bool, "bool"), (int, "int"), (float, "float"))


def is_python_op(target: Any) -> bool:
    """Tell whether a node of a trace calls a Function, forward or backward."""
    ops = torch.ops.torch_ort
    return target in (ops.python_op.default, ops.python_op_grad.default)


def call_in(node: fx.Node) -> FunctionCall | BackwardCall:
    """Give the call that a node of a trace stands for."""
    key = node.args[-1] if len(node.args) == 3 else node.kwargs["function"]
    return call_of(key)


def attributes(call: FunctionCall | BackwardCall) -> dict[str, Any]:
    """Give the attributes of a node besides the types of its tensors."""
    if isinstance(call, BackwardCall):
        return _of_backward(call)
    attrs = _shared(call) | {
        "input_convention": call.convention,
        "input_requires_grads": _flags(call),
        "training_mode": int(call.grad_mode),
        "tensor_reuse_map": _alias_maps(call)[0],
    }
    scalars: dict[str, list] = {}
    for position, value in enumerate(call.values):
        if not isinstance(value, Hole):
            _add_constant(scalars, position, value)
    return attrs | scalars


def _of_backward(call: BackwardCall) -> dict[str, Any]:
    forward = call.forward
    given = set(call.positions)
    return _shared(forward) | {
        "output_convention": "".join(
            "d" if i in given else "c" for i in range(len(forward.requires_grad))
        ),
        "bw_tensor_reuse_map": _alias_maps(forward)[1],
    }


def _shared(call: FunctionCall) -> dict[str, Any]:
    return {
        "func_name": call.name,
        # Memory that the Function does not own, but keeps, is copied in every call.
        "safe_run_mode": 1,
        "comment": (call.function.__doc__ or "").strip().partition("\n")[0],
    }


def _flags(call: FunctionCall) -> list[int]:
    """One flag for each argument."""
    return [
        int(type(value) is Hole and not value.is_size and call.requires_grad[value.index])
        for value in call.values
    ]


def _add_constant(scalars: dict[str, list], position: int, value: Any) -> None:
    for kind, name in _KINDS:
        if type(value) is kind:
            number = float(value) if kind is float else int(value)
            scalars.setdefault(f"input_{name}_scalars", []).append(number)
            scalars.setdefault(f"input_{name}_scalar_positions", []).append(position)
            return
        if type(value) is tuple and value and all(type(item) is kind for item in value):
            numbers = scalars.setdefault(f"input_{name}_tuples", [])
            scalars.setdefault(f"input_{name}_tuple_begins", []).append(len(numbers))
            scalars.setdefault(f"input_{name}_tuple_positions", []).append(position)
            numbers += [float(item) if kind is float else int(item) for item in value]
            return
    scalars.setdefault("input_pointer_scalars", []).append(id(value))
    scalars.setdefault("input_pointer_scalar_positions", []).append(position)


def _alias_maps(call: FunctionCall) -> tuple[list[int], list[int]]:
    """Ask the class which results lie in the memory of which arguments."""
    forward = [-1] * (1 + len(call.learnt.places))
    backward = [-1] * len(call.requires_grad)
    declare = getattr(call.function, "alias_input", None)
    if declare is None:
        return forward, backward
    text = f"PythonOp <func_name = {call.name!r}, input_convention = {call.convention!r}>"
    maps = declare(text)
    for given, fitting, what in zip(
        maps, (forward, backward), ("forward", "backward"), strict=True
    ):
        if what == "forward" and len(given) != len(fitting):
            raise Unsupported(
                f"{call.name}.alias_input: got {len(given)} entries for forward, want "
                f"{len(fitting)}: one for the context and one for each output"
            )
        if not all(isinstance(i, int) and -1 <= i < max(1, len(call.values)) for i in given):
            raise Unsupported(
                f"{call.name}.alias_input: got {list(given)} for {what}, want the positions of "
                "arguments, or -1"
            )
    return list(maps[0]), list(maps[1])


def add_node(reader: Any, node: fx.Node) -> None:
    """Tell a reader of FX graphs about a node that calls a Function."""
    call = call_in(node)
    reader.functions.append(call)
    reader.emit_with_attributes(node, attributes(call))
