"""Positions of outputs, gradients and inputs in an FX graph and in the engine's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.pytorch import (
    graph_compat,
)
from torch_ort.read.fx_reader import FxReader


class OutputLayout:
    """Which outputs are tensors, which sizes (0-d tensors in the engine) and which constants.

    Others are objects that the engine knows nothing of, such as the device mesh of a DTensor:
    inputs of the graph that pass through it. They join `objects`.
    """

    def __init__(self, outputs: Sequence[Any], objects: list[fx.Node] | None = None) -> None:
        self.objects = [] if objects is None else objects
        self.names: list[str] = []  # of the engine's outputs
        self.sizes: list[tuple[str, fx.Node]] = []  # sizes that the graph must make tensors of
        self.tensors: list[fx.Node] = []
        self._kinds: list[tuple[str, Any]] = []
        for i, output in enumerate(outputs):
            value = output.meta.get("val") if isinstance(output, fx.Node) else output
            if isinstance(value, torch.Tensor):
                self._kinds.append(("tensor", len(self.names)))
                self.names.append(output)
                self.tensors.append(output)
            elif isinstance(value, torch.SymInt):
                name = f"size_output_{i}"
                self._kinds.append(("size", len(self.names)))
                self.names.append(name)
                self.sizes.append((name, output))
            elif value is None or isinstance(value, int | float | bool):
                self._kinds.append(("constant", value))
            elif graph_compat.is_passed_object(output):
                if output not in self.objects:
                    self.objects.append(output)
                self._kinds.append(("object", self.objects.index(output)))
            else:
                raise Unsupported(
                    f"output {i}: got {type(value).__name__}, want a tensor or an integer"
                )

        self.are_tensors = all(kind == "tensor" for kind, _ in self._kinds)

    def engine_index(self, position: int) -> int | None:
        """Position among the engine's outputs; None for a constant or an object."""
        kind, what = self._kinds[position]
        return what if kind in ("tensor", "size") else None

    def resolve(self, reader: FxReader) -> list[str]:
        """Make the sizes in the graph; give the engine's names of all its outputs."""
        for name, node in self.sizes:
            reader.add_size_as_tensor(name, node)
        return [
            reader.value_name(item) if isinstance(item, fx.Node) else item for item in self.names
        ]

    def assemble(self, results: Sequence[torch.Tensor], objects: Sequence[Any] = ()) -> list[Any]:
        """Put the engine's outputs, and objects of a call, where AOTAutograd expects them."""
        outputs: list[Any] = []
        for kind, what in self._kinds:
            if kind == "tensor":
                outputs.append(results[what])
            elif kind == "object":
                outputs.append(objects[what])
            else:
                outputs.append(results[what].item() if kind == "size" else what)
        return outputs


class JointLayout:
    """Where everything stands in a joint graph, and in the argument lists of its stubs."""

    def __init__(self, joint: fx.GraphModule, num_forward_outputs: int) -> None:
        self.joint = joint
        # Those of `given_tangents` that are tensors are `tangents`; others are objects, which the
        # gradient of a DTensor has beside its local tensor.
        self.primals, self.given_tangents = graph_compat.split_placeholders(joint)
        self.tangents = [
            node for node in self.given_tangents if not graph_compat.is_passed_object(node)
        ]
        output = next(node for node in joint.graph.nodes if node.op == "output")
        self.forward_outputs = list(output.args[0][:num_forward_outputs])
        self.gradients = list(output.args[0][num_forward_outputs:])
        # The primals that pass through to outputs or gradients as they are.
        self.objects: list[fx.Node] = []
        self.outputs = OutputLayout(self.forward_outputs, self.objects)
        self.gradient_layout = OutputLayout(self.gradients, self.objects)
        if not set(self.objects) <= set(self.primals):
            raise Unsupported("gradients: got an object of a gradient as a gradient, want tensors")
        self.object_inputs = [self.primals.index(node) for node in self.objects]
        # The inputs whose gradients the engine computes.
        self.differentiated = [
            i
            for i in range(len(self.gradients))
            if self.gradient_layout.engine_index(i) is not None
        ]
        if self.gradient_layout.sizes:
            raise Unsupported("gradients: got a size as a gradient, want tensors only")
        for tangent in self.tangents:
            if not isinstance(tangent.meta.get("val"), torch.Tensor):
                raise Unsupported(
                    f"gradient {tangent.name}: got something else than a tensor, want a tensor"
                )
        self.saved: list[fx.Node] = []
        self.order: list[int] = []  # position of each of the engine's saved tensors among `saved`
        self.tensor_inputs: list[int] = []
        self.symbol_inputs: list[int] = []
        written = graph_compat.written_placeholders(joint.graph)
        self.written = [i for i, node in enumerate(self.primals) if node in written]

    def with_objects(self, tangents: Sequence[Any]) -> list[Any]:
        """Give what backward is given from its tensors; None stands for objects."""
        by_node = dict(zip(self.tangents, tangents, strict=True))
        return [by_node.get(node) for node in self.given_tangents]

    def only_tensors(self, given: Sequence[Any]) -> list[Any]:
        """Give the tensors, and None, of what backward is given."""
        if len(self.tangents) == len(self.given_tangents):
            return list(given)
        by_node = dict(zip(self.given_tangents, given, strict=True))
        return [by_node[node] for node in self.tangents]

    def gradient_inputs(self) -> list[int]:
        """Give, by gradient of the engine, the position of the engine's input that it is of.

        -1 where that is not known.
        """
        positions = {self.primals[primal]: i for i, primal in enumerate(self.tensor_inputs)}
        inputs = [-1] * len(self.gradient_layout.names)
        differentiated = graph_compat.differentiated(self.joint, len(self.forward_outputs))
        for i, primal in enumerate(differentiated):
            index = self.gradient_layout.engine_index(i)
            if index is not None:
                inputs[index] = positions.get(primal, -1)
        return inputs

    def gradients_of(self, primals: Sequence[int]) -> list[int]:
        """Give the positions, among the engine's gradients, of those of some primals."""
        wanted = {self.primals[i] for i in primals}
        differentiated = graph_compat.differentiated(self.joint, len(self.forward_outputs))
        found = [
            self.gradient_layout.engine_index(i)
            for i, primal in enumerate(differentiated)
            if primal in wanted
        ]
        return [index for index in found if index is not None]

    def note_saved(self, session: _C.Session) -> None:
        """Order what autograd saves: values that it need not watch go last."""
        inputs = [self.primals[self.tensor_inputs[i]] for i in session.saved_inputs]
        outputs = [self.outputs.names[i] for i in session.saved_outputs]
        engine_order = inputs + outputs
        self.saved = sorted(engine_order, key=graph_compat.needs_no_version_check)
        self.order = [self.saved.index(node) for node in engine_order]
        self.to_saved = [engine_order.index(node) for node in self.saved]
