"""From a captured graph to what runs it: program, session, and the callable around it.

Both roads end here: graphs of the recorder (recorded.py) and of AOTAutograd (traced.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_ort.capture.input_density import input_density
from torch_ort.core import counting
from torch_ort.core.refusals import NoCapture
from torch_ort.engine import compiler, onnx_files
from torch_ort.engine.program import Program
from torch_ort.fallback import stage
from torch_ort.functions.call import end_of_capture
from torch_ort.pytorch import dynamo_compat, graph_compat, trace_compat, versions
from torch_ort.read.layouts import JointLayout
from torch_ort.read.programs import read_inference, read_joint
from torch_ort.read.sparse import add_as_sparse
from torch_ort.rules.symbols import symbol_name
from torch_ort.steps.runners import ForwardRunner, InferenceRunner
from torch_ort.steps.state import GraphState

# Describes a graph's inputs for saved files and messages.
Sources = Callable[[], Sequence[onnx_files.Source | None]]

READS_MEMORY = "forward reads the memory of an argument that is not dense (as_strided)"
_DRAWS_IN_ORDER = "forward draws numbers in the memory order of an argument that is not dense"


class JointGraph(NamedTuple):
    """A graph of forward and backward that has been read."""

    layout: JointLayout
    program: Program


class GraphCompiler:
    """Compiles the graphs of one capture.

    `parameters` are the positions among the inputs of what the module keeps, where Dynamo has not
    told AOTAutograd so.
    """

    def __init__(self, state: GraphState, parameters: frozenset[int] = frozenset()) -> None:
        self.state = state
        self.options = state.options
        self.has_higher_order = False  # whether an operator has graphs as arguments
        # Inputs that, where they are not dense, may not be replaced by a dense copy, and why.
        self.uncopied: dict[int, str] = {}
        self._parameters = parameters
        self._sources: Sequence[onnx_files.Source | None] = []  # of the inputs

    @property
    def writes_files(self) -> bool:
        """Tell whether graphs are written to files."""
        return self.options.save_onnx or self.state.files is not None

    @contextmanager
    def capturing(self, road: str, sources: Sources) -> Iterator[None]:
        """Capture in the block: count and time it, then free what only files and traces need."""
        versions.warn_of_untested()
        dynamo, start = dynamo_compat.dynamo_seconds(), time.perf_counter()
        if self.writes_files or self.state.names_inputs or self.options.print_input_density:
            self._sources = sources()
        try:
            with trace_compat.meta_errors_unsaid():
                yield
        finally:
            self._sources = []  # they hold tensors of the module
            end_of_capture()
        counting.count("graphs_captured")
        self._note_seconds(dynamo, time.perf_counter() - start, road)

    def _note_seconds(self, dynamo: float | None, spent: float, road: str) -> None:
        """Tell the first graph what capture took: Dynamo until it called us, the road alone."""
        ours = sum(sum(program.seconds.values()) for program in self.state.programs)
        for program in self.state.programs[:1]:
            if dynamo is not None:
                program.seconds["dynamo"] = dynamo
            program.seconds[road] = spent - ours

    def keep_uncopied(self, positions: set[int], why: str) -> None:
        """Let no dense copy replace some of the inputs."""
        self.uncopied.update(dict.fromkeys(positions, why))

    def check(self, graph: fx.Graph) -> None:
        """Note what calls of a graph need; raise NoCapture where it would give other results."""
        if graph_compat.writes_into_windows(graph):
            raise NoCapture(
                "forward writes into what unfold gave, where PyTorch's functionalization would set "
                "elements outside of the windows to 0; clone the result of unfold first"
            )
        if graph_compat.replaces_memory(graph):
            raise NoCapture(
                "forward gives other memory to a tensor (by an assignment to its `data`, or by "
                "`set_`), and the memory of a captured graph's values ends with the call"
            )
        self.has_higher_order = graph_compat.has_higher_order(graph)
        if self.options.exact_random:
            self.keep_uncopied(graph_compat.inputs_that_order_draws(graph), _DRAWS_IN_ORDER)
        self.keep_uncopied(graph_compat.addressed_inputs(graph), READS_MEMORY)
        self.state.is_repeatable = graph_compat.is_repeatable(graph)

    def read_joint(
        self, joint: torch.nn.Module, num_outputs: int, parameters: Sequence[int] | None = None,
        can_be_lazy: bool = False,
    ) -> JointGraph:  # fmt: skip
        """Read a joint graph, whose first `num_outputs` results are forward's.

        `parameters` are those that AOTAutograd knows of. Logits can be lazy where the results of
        the graph are not AOTAutograd's choice.
        """
        with stage("convert"):
            add_as_sparse(joint.graph, num_outputs)
            layout = JointLayout(joint, num_outputs)
            program = read_joint(layout, self.options)
        program.gradient_inputs = layout.gradient_inputs()
        program.can_be_lazy = can_be_lazy
        if "deliver_gradients" not in self.options.disable:
            program.parameter_gradients = layout.gradients_of(
                parameters or self._parameter_positions(layout.primals)
            )
        return JointGraph(layout, program)

    def compile_joint(self, graph: JointGraph, is_one_of_two: bool = False) -> ForwardRunner:
        """Compile a joint graph that was read; `is_one_of_two` with different backwards."""
        layout, program = graph
        sources = self._sources_of(layout.primals)
        session = self._compile(program, sources, self.state.files)
        return self._runner(graph, session, sources, is_one_of_two)

    def compile_later(self, graph: JointGraph) -> ForwardRunner:
        """Compile the second of two joint graphs, after its capture: no file shows it."""
        return self._runner(graph, self._compile(graph.program, {}, None), {}, True)

    def compile_inference(
        self, module: torch.nn.Module, can_be_lazy: bool = False
    ) -> InferenceRunner:
        """Compile a graph without gradients."""
        self.check(module.graph)
        with stage("convert"):
            add_as_sparse(module.graph)
            program, outputs = read_inference(module, self.options)
        program.can_be_lazy = can_be_lazy
        placeholders = module.graph.find_nodes(op="placeholder")
        session = self._compile(program, self._sources_of(placeholders), self.state.files)
        written = graph_compat.written_placeholders(module.graph)
        positions = [i for i, node in enumerate(placeholders) if node in written]
        objects = [placeholders.index(node) for node in outputs.objects]
        return InferenceRunner(program, session, outputs, objects, positions, self.state)

    def _compile(
        self, program: Program, sources: dict[str, onnx_files.Source], files: Any
    ) -> Any:  # fmt: skip
        session = compiler.compile_program(
            program, self.options, sources, files, self.state.rewrite
        )
        self.state.programs.append(program)
        return session

    def _runner(
        self, graph: JointGraph, session: Any, sources: dict[str, onnx_files.Source],
        is_one_of_two: bool,
    ) -> ForwardRunner:  # fmt: skip
        layout, program = graph
        density = None
        if self.options.print_input_density:
            density = input_density(layout.joint.graph, layout.primals, sources)
        return ForwardRunner(
            layout, session, self.options, self.state, program.recomputation, density, is_one_of_two
        )

    def _parameter_positions(self, primals: Sequence[fx.Node]) -> list[int]:
        return [
            i
            for i, node in enumerate(primals)
            if graph_compat.input_position(node) in self._parameters
        ]

    def _sources_of(self, placeholders: Sequence[fx.Node]) -> dict[str, onnx_files.Source]:
        """Tell where inputs and symbols come from, by their names in the engine."""
        sources = {}
        for node in placeholders:
            position = graph_compat.input_position(node)
            if position is None or position >= len(self._sources):
                continue
            value = node.meta["val"]
            name = symbol_name(value) if isinstance(value, torch.SymInt) else node.name
            if name is not None and self._sources[position] is not None:
                sources[name] = self._sources[position]
        return sources
