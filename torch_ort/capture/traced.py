"""Capture by AOTAutograd, for what the recorder cannot do.

AOTAutograd traces a module and calls us three times: with the joint graph, for its partition into
forward and backward, and with each of both, to be compiled. The joint graph is compiled at the
first; both graphs that AOTAutograd gets are stubs, which carry metadata alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.capture.attention import attention_chosen
from torch_ort.capture.graphs import GraphCompiler, Sources
from torch_ort.core import autocast
from torch_ort.core.user_code import blame
from torch_ort.guards.overlapping_writes import overlapping_writes_refused
from torch_ort.pytorch import dynamo_compat, graph_compat, trace_compat
from torch_ort.pytorch.dispatch_compat import operators_whole, sparse_gradients_whole
from torch_ort.steps.double_backward import RefusingStep
from torch_ort.steps.runners import ForwardRunner
from torch_ort.steps.stubs import make_stubs, remember_gradients

_DATA_IS_ASKED = (
    "data-dependent: Python asks for a number in a tensor (a branch, float(), item()), which a "
    "captured graph does not know"
)


def trace_and_compile(
    compiler: GraphCompiler, module: torch.nn.Module, inputs: Sequence[Any], sources: Sources
) -> Any:
    """Trace a module with flat inputs; give what runs instead of it.

    Raises Unsupported or InternalError; whatever AOTAutograd itself cannot trace becomes
    Unsupported.
    """
    trace = _Trace(compiler)
    backend = graph_compat.aot_autograd(
        fw_compiler=lambda stub, inputs: trace.forward,
        bw_compiler=lambda stub, inputs: trace.forward.backward,
        inference_compiler=lambda graph, inputs: compiler.compile_inference(graph),
        partition_fn=trace.partition,
        keep_inference_input_mutations=True,
    )
    with compiler.capturing("aot", sources):
        try:
            with (
                operators_whole(),
                sparse_gradients_whole(),
                attention_chosen(compiler.options),
                graph_compat.backward_without_autocast(),
                trace_compat.anomalies_unsaid(),
                trace_compat.sizes_of_inputs_kept(),
                overlapping_writes_refused(),
            ):
                compiled = backend(module, inputs)
        except _C.Error:
            raise
        except Exception as error:
            if dynamo_compat.passes_through(error):
                raise
            if trace_compat.data_is_asked(error):
                raise Unsupported(_DATA_IS_ASKED) from error
            blame(error, *graph_compat.node_that_raised(error))
            raise Unsupported(f"AOTAutograd: {type(error).__name__}: {error}") from error
    if trace.forward is None:
        return compiled
    return RefusingStep(compiled, compiler.state, trace.forward, trace.states)


class _Trace:
    """What the partition of one trace leaves for the calls after it."""

    def __init__(self, compiler: GraphCompiler) -> None:
        self._compiler = compiler
        self.forward: ForwardRunner | None = None  # None for a graph without gradients
        # The states of autocast in which backward is that of the graph.
        self.states = [autocast.OFF]

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **unused: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Compile the joint graph and give the two stubs. See `partition_fn` of AOTAutograd."""
        # This is the body of a nested_compile_region, which is compiled before its outer graph.
        if not joint_inputs:
            return graph_compat.default_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=static_lifetime_input_indices, **unused
            )  # fmt: skip
        self._compiler.check(joint.graph)
        graph = self._compiler.read_joint(joint, num_fwd_outputs, static_lifetime_input_indices)
        self.forward = self._compiler.compile_joint(graph)
        around = autocast.state_now()
        if around and not graph_compat.may_differ_under_autocast(joint, around):
            self.states.append(around)
        session = self.forward.session
        graph.layout.note_saved(session)
        remember_gradients(graph.layout, session)
        return make_stubs(graph.layout, session)
