"""Stub graphs for AOTAutograd: the metadata of forward or backward around one engine call."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.pytorch import (
    graph_compat,
)
from torch_ort.read.layouts import JointLayout

_gradient_fakes: dict[int, list[torch.Tensor]] = {}


def remember_gradients(layout: JointLayout, session: _C.Session) -> None:
    """Remember the fakes of a session's gradients, for compiled autograd."""
    _gradient_fakes[session.id] = [node.meta["val"] for node in layout.gradient_layout.tensors]


def release_fakes() -> None:
    """Forget the fakes of gradients; called when compiled code is reset."""
    _gradient_fakes.clear()


@torch.library.register_fake("torch_ort::run_backward")
def _fake_backward(
    session: int, token: torch.Tensor, saved: list[torch.Tensor], tangents: list[torch.Tensor]
) -> list[torch.Tensor]:
    fakes = _gradient_fakes.get(session)
    if fakes is None or any(isinstance(n, torch.SymInt) for fake in fakes for n in fake.shape):
        raise Unsupported(
            "compiled autograd: cannot trace a graph of torch_ort, whose gradients have sizes "
            "that are known at run time only"
        )
    return [
        torch.empty_strided(
            fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device
        ) for fake in fakes
    ]  # fmt: skip


def make_stubs(layout: JointLayout, session: _C.Session) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Give stub graphs of forward and backward, with the metadata that AOTAutograd reads."""
    token_meta = {"val": graph_compat.fake_token(layout.primals)}

    def placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
        new = graph.placeholder(node.name)
        new.meta = dict(node.meta)
        return new

    def item(graph: fx.Graph, call: fx.Node, index: int, name: str, meta: dict) -> fx.Node:
        new = graph.create_node("call_function", operator.getitem, (call, index), name=name)
        new.meta = dict(meta)
        return new

    graph = fx.Graph()
    inputs = {node: placeholder(graph, node) for node in layout.primals}
    tensors = [inputs[layout.primals[i]] for i in layout.tensor_inputs]
    symbols = [inputs[layout.primals[i]] for i in layout.symbol_inputs]
    call = graph.call_function(
        torch.ops.torch_ort.run_forward.default, (session.id, tensors, symbols, False)
    )
    made: dict[fx.Node, fx.Node] = {}
    outputs: list[Any] = []
    for i, output in enumerate(layout.forward_outputs):
        index = layout.outputs.engine_index(i)
        if index is None:
            outputs.append(inputs.get(output) if isinstance(output, fx.Node) else output)
            continue
        if output not in made:
            # A hook that is a graph finds saved values by name, so both stubs must use the same
            # names.
            name = output.name if output not in inputs else f"{output.name}_out"
            made[output] = item(graph, call, index, name, output.meta)
        outputs.append(made[output])
    token = item(graph, call, session.num_outputs, "token", token_meta)
    saved = [inputs[node] if node in inputs else made[node] for node in layout.saved]
    objects = [inputs[node] for node in layout.objects]
    graph.output((*outputs, token, *saved, *objects))
    forward = fx.GraphModule(layout.joint, graph)

    graph = fx.Graph()
    token = graph.placeholder("token")
    token.meta = dict(token_meta)
    saved = [placeholder(graph, node) for node in layout.saved]
    objects = {node: placeholder(graph, node) for node in layout.objects}
    given = {node: placeholder(graph, node) for node in layout.given_tangents}
    tangents = [given[node] for node in layout.tangents]
    call = graph.call_function(
        torch.ops.torch_ort.run_backward.default, (session.id, token, saved, tangents)
    )
    gradients = []
    for i, gradient in enumerate(layout.gradients):
        index = layout.gradient_layout.engine_index(i)
        if index is None:
            gradients.append(objects.get(gradient))
        else:
            gradients.append(item(graph, call, index, f"gradient_{i}", gradient.meta))
    graph.output(tuple(gradients))
    return forward, fx.GraphModule(layout.joint, graph)
