"""Records a graph from Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from torch_ort.capture.joint import Capture
from torch_ort.core.refusals import HandOver
from torch_ort.dynamo.inputs import DynamoInputs
from torch_ort.engine import onnx_files
from torch_ort.pytorch import (
    dynamo_compat,
)
from torch_ort.pytorch.dispatch_compat import outside_inference_mode
from torch_ort.read.descriptions import line_of
from torch_ort.record.recorder import (
    at_line,
    enters_program,
)
from torch_ort.steps.state import GraphState


class _Lines(fx.Interpreter):
    """Runs a graph from Dynamo, and sets the user's line of each node for the recorder."""

    @enters_program
    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        with at_line(line_of(n)):
            return super().run_node(n)


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
    capture = Capture(state.options, state, kept)
    with outside_inference_mode():
        given = DynamoInputs(dynamo_compat.symbolic_inputs(module.graph, inputs))
        step = capture.record(_Lines(module).run, given.inputs, sources, module.forward)
    written = set(capture.recording.written) - kept
    if written:  # tensors of later calls may share memory
        raise HandOver(f"input {min(written)}, which the caller brings, is written into")
    given.tell_guards()
    return step
