"""Passes of the user's own over the captured graph, as ONNX."""

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

    The function gets the joint graph of forward and backward, with the node
    `com.microsoft::YieldOp` between them, as an ONNX GraphProto, and returns it changed (or None,
    having changed it in place). ONNX Runtime Training gave such functions the forward graph alone;
    here the gradient of what is changed in forward has to be changed as well. Inputs and outputs
    must stay as they are. An exception of the function comes out of the call as UserError.

    `target_modules` are names of module classes with `|` between them, `devices` types of devices
    likewise; higher priorities run earlier. An ORTModule that has captured already needs
    `recapture()`.
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
    """Forget a function given to `register_graph_optimizer`."""
    _registered[:] = [entry for entry in _registered if entry.function is not function]


def rewrite_for(
    module: torch.nn.Module, device: str, max_opset: int
) -> Callable[[_C.Graph], _C.Graph] | None:
    """Give what the registered functions make of a module's graphs; None if there are none."""
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
                    "of the graph have changed"
                )
        # What it runs, the user's own program has written.
        return _C.Graph.from_onnx(model.SerializeToString(), allow=["*"])

    return rewrite


def _names(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split("|"))


def _signature(graph: onnx.GraphProto) -> tuple[list[str], list[str]]:
    return [value.name for value in graph.input], [value.name for value in graph.output]
