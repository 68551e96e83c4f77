"""Turns FX graphs into programs of the engine, for training or for inference."""

from __future__ import annotations

import time

from torch import fx

from torch_ort.engine.program import Program
from torch_ort.options import Options
from torch_ort.pytorch import (
    graph_compat,
)
from torch_ort.read.fx_reader import FxReader
from torch_ort.read.layouts import JointLayout, OutputLayout


def read_joint(layout: JointLayout, options: Options) -> Program:
    """Turn a joint FX graph into a training graph with its YieldOp."""
    reader = FxReader(layout.joint, "training", options.opset)
    reader.add_placeholders(layout.primals)
    forward, backward = graph_compat.forward_and_backward_nodes(
        layout.joint, layout.forward_outputs
    )
    reader.add_nodes(forward)
    names = layout.outputs.resolve(reader)
    reader.add_yield_nodes(names, layout.tangents)
    reader.add_nodes(backward)
    reader.reader.set_outputs(layout.gradient_layout.resolve(reader))
    layout.tensor_inputs = reader.tensor_inputs
    layout.symbol_inputs = reader.symbol_inputs
    return _program(reader, is_training=True)


def read_inference(module: fx.GraphModule, options: Options) -> tuple[Program, OutputLayout]:
    """Turn an FX graph without gradients into a graph."""
    reader = FxReader(module, "inference", options.opset)
    nodes = list(module.graph.nodes)
    reader.add_placeholders([node for node in nodes if node.op == "placeholder"])
    reader.add_nodes([node for node in nodes if node.op not in ("placeholder", "output")])
    outputs = OutputLayout(list(nodes[-1].args[0]))
    reader.reader.set_outputs(outputs.resolve(reader))
    return _program(reader, is_training=False), outputs


def _program(reader: FxReader, is_training: bool) -> Program:
    graph = reader.reader.take()
    seconds = {"read": time.perf_counter() - reader.started}
    return Program(
        graph, reader.constants, is_training, reader.tensor_inputs, reader.symbol_inputs,
        seconds=seconds, functions=reader.functions,
    )  # fmt: skip
