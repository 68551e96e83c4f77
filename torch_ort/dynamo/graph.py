"""Records a graph from Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_ort.capture.graphs import GraphCompiler
from torch_ort.capture.recorded import record_and_compile
from torch_ort.core.refusals import HandOver, NoCapture
from torch_ort.dynamo.inputs import DynamoInputs
from torch_ort.engine import onnx_files
from torch_ort.pytorch import (
    dynamo_compat,
)
from torch_ort.pytorch.dispatch_compat import outside_inference_mode
from torch_ort.read.descriptions import line_of
from torch_ort.record.reasons import enters_program
from torch_ort.record.recorder import at_line
from torch_ort.steps.state import GraphState


class _Lines(fx.Interpreter):
    """Runs a graph from Dynamo, and sets the user's line of each node for the recorder.

    Where the graph reads a number of the user's program, the one of `given` stands for it. What
    Dynamo asserts of sizes that data tells comes last, so that operators raise their own errors,
    as in eager PyTorch.
    """

    def __init__(self, module: fx.GraphModule, given: DynamoInputs) -> None:
        super().__init__(module)
        self._given = given
        self._assertions: list[tuple[fx.Node, tuple, dict]] = []

    @enters_program
    def run(self, *inputs: Any) -> Any:
        """Run the graph."""
        result = super().run(*inputs)
        for node, args, kwargs in self._assertions:
            with at_line(line_of(node)):
                node.target(*args, **kwargs)
        return result

    @enters_program
    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        with at_line(line_of(n)):
            if n in self._given.reads:
                return self._given.number_read_by(n, self.env[n.args[0]])
            if n.target is torch.ops.aten._assert_scalar.default and not n.users:
                self._assertions.append((n, *self.fetch_args_kwargs_from_env(n)))
                return None
            value = super().run_node(n)
            return self._given.number_given_by(n, value) if n.op == "placeholder" else value


def record_dynamo_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    sources: Callable[[], Sequence[onnx_files.Source | None]],
    state: GraphState,
) -> Any:
    """Record a graph from Dynamo and give a callable for it.

    Raises HandOver for what only AOTAutograd does.
    """
    if dynamo_compat.calls_transforms(module.graph):
        raise HandOver("the graph calls operators that take graphs, or transforms of torch.func")
    kept = dynamo_compat.kept_inputs(module.graph)
    compiler = GraphCompiler(state, kept)
    values = dynamo_compat.symbolic_inputs(module.graph, inputs)
    with outside_inference_mode():
        given = DynamoInputs(values, module.graph)
        try:
            return _record(compiler, module, given, sources, kept)
        except Exception as error:
            # Some of PyTorch's formulas compute with numbers that they take for known.
            if isinstance(error, NoCapture) or not given.has_numbers:
                raise
            state.programs.clear()
        given = DynamoInputs(values, module.graph, opens_numbers=False)
        return _record(compiler, module, given, sources, kept)


def _record(
    compiler: GraphCompiler, module: fx.GraphModule, given: DynamoInputs,
    sources: Callable[[], Sequence[onnx_files.Source | None]], kept: frozenset[int],
) -> Any:  # fmt: skip
    run = _Lines(module, given).run
    recording, step = record_and_compile(
        compiler, run, given.inputs, sources, module.forward, new_size=given.new_size
    )
    if recording.switched:
        raise HandOver(f"requires_grad of input {min(recording.switched)} is set")
    written = set(recording.written) - kept
    if written:  # tensors of later calls may share memory
        raise HandOver(f"input {min(written)}, which the caller brings, is written into")
    given.tell_guards(recording.asked)
    return step
