"""Graph optimizers: passes of the user's own over the captured graph, in ONNX form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx
import torch

from torch_ort import _C
from torch_ort._C import UserError

Optimizer = Callable[[onnx.GraphProto], onnx.GraphProto | None]


@dataclass(frozen=True)
class _Registered:
    function: Optimizer
    target_modules: frozenset[str]
    devices: frozenset[str]
    priority: int


_registered: list[_Registered] = []


def register_graph_optimizer(
    target_modules: str = "all", devices: str = "all", priority: int = 0
) -> Callable[[Optimizer], Optimizer]:
    """Register a function that changes the graphs of ORTModules before the engine optimizes them.

    The function gets the joint graph of forward and backward as an ONNX GraphProto, with a node
    `com.microsoft::YieldOp` between the two. It returns the changed graph, or None if it has
    changed the graph in place. Names and order of inputs and outputs must stay as they are. Unlike
    in ONNX Runtime Training, whose functions got the forward graph alone, a change of forward must
    be accompanied by the change of its gradient.

        @torch_ort.ortmodule.register_graph_optimizer(target_modules="MyModel", devices="cpu")
        def optimize(graph): ...

    Args:
        target_modules: Names of the classes of wrapped modules, joined by `|`; "all" for any.
        devices: Types of devices, joined by `|`; "all" for any.
        priority: Functions with a higher priority run earlier.

    Returns a decorator. Graphs that are captured already stay as they are until `recapture()`. An
    exception of the function, or changed inputs or outputs, come out of the module's call as
    UserError.
    """

    def register(function: Optimizer) -> Optimizer:
        _registered.append(
            _Registered(
                function,
                _names(target_modules),
                _names(devices),
                priority,
            )
        )
        return function

    return register


def unregister_graph_optimizer(function: Optimizer) -> None:
    """Undo `register_graph_optimizer` for a function; of no effect if it is not registered."""
    _registered[:] = [entry for entry in _registered if entry.function is not function]


def rewrite_for(
    module: torch.nn.Module, device: str, max_opset: int
) -> Callable[[_C.Graph], _C.Graph] | None:
    """Give a function that applies the registered ones that fit a module; None if none does."""
    chosen = sorted(
        (
            entry
            for entry in _registered
            if {"all", type(module).__name__} & entry.target_modules
            and {"all", device} & entry.devices
        ),
        key=lambda entry: -entry.priority,
    )
    if not chosen:
        return None

    def rewrite(graph: _C.Graph) -> _C.Graph:
        model = onnx.load_from_string(graph.to_onnx(max_opset))
        names = _signature(model.graph)
        for entry in chosen:
            try:
                changed = entry.function(model.graph)
            except Exception as error:
                raise UserError(
                    f"register_graph_optimizer: {entry.function.__name__}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if changed is not None and changed is not model.graph:
                model.graph.CopyFrom(changed)
            if _signature(model.graph) != names:
                raise UserError(
                    f"register_graph_optimizer: {entry.function.__name__}: the inputs or outputs "
                    "of the graph have changed, want the same names in the same order"
                )
        # All operators are allowed, because the user's own program has written the graph.
        return _C.Graph.from_onnx(model.SerializeToString(), allow=["*"])

    return rewrite


def _names(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split("|"))


def _signature(graph: onnx.GraphProto) -> tuple[list[str], list[str]]:
    return [value.name for value in graph.input], [value.name for value in graph.output]
