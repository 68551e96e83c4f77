"""Capture of joint graphs: by the recorder, else by AOTAutograd with our partition function.

What AOTAutograd gets back are two stubs that carry metadata, and two callables behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.capture.attention import attention_chosen
from torch_ort.capture.input_density import input_density
from torch_ort.core import autocast, counting
from torch_ort.core.refusals import NoCapture
from torch_ort.core.switches import OWN_KERNELS
from torch_ort.core.user_code import blame
from torch_ort.engine import compiler, onnx_files
from torch_ort.engine.program import Program
from torch_ort.fallback import Failure, stage, within_boundary
from torch_ort.functions.call import end_of_capture
from torch_ort.options import Options
from torch_ort.pytorch import (
    dynamo_compat,
    graph_compat,
    trace_compat,
)
from torch_ort.pytorch.dispatch_compat import operators_whole, sparse_gradients_whole
from torch_ort.read.layouts import JointLayout
from torch_ort.read.programs import read_inference, read_joint
from torch_ort.read.sparse import add_as_sparse
from torch_ort.record.recorder import (
    Recording,
    is_reason_to_hand_over,
    log_hand_over,
    record,
)
from torch_ort.rules.data_sizes import NewSize
from torch_ort.rules.symbols import symbol_name
from torch_ort.steps.again import CallAgain
from torch_ort.steps.double_backward import DoubleBackward, RefusingStep
from torch_ort.steps.recorded import GraphStep, RecordedRun, RecordedStep
from torch_ort.steps.runners import ForwardRunner, InferenceRunner
from torch_ort.steps.state import GraphState
from torch_ort.steps.stubs import make_stubs, remember_gradients

_DATA_IS_ASKED = (
    "data-dependent: Python asks for a number in a tensor (a branch, float(), item()), which a "
    "captured graph does not know"
)

_READS_MEMORY = "forward reads the memory of an argument that is not dense (as_strided)"
_GIVES_BACK = "forward gives an argument back, or a view of it, that is not dense"
_DRAWS_IN_ORDER = "forward draws numbers in the memory order of an argument that is not dense"


class Capture:
    """One graph to be captured: holds what partition_fn leaves for the compilers.

    `parameters` are the positions among the inputs of what the module keeps, where Dynamo has not
    told AOTAutograd so.
    """

    def __init__(
        self, options: Options, state: GraphState, parameters: frozenset[int] = frozenset()
    ) -> None:
        self.options = options
        self.state = state
        self.has_higher_order = False  # whether an operator has graphs as arguments
        # Inputs for which a dense copy must not be passed if they are not dense, and why.
        self.lying: dict[int, str] = {}
        self._parameters = parameters
        self.recording: Recording | None = None
        self._forward: ForwardRunner | None = None
        # The states of autocast in which backward is that of the graph, where AOTAutograd makes it.
        self._states = [autocast.OFF]
        self._sources: Sequence[onnx_files.Source | None] = []  # of the inputs
        # If not, AOTAutograd decides what the graph returns.
        self._is_recorded = False

    @property
    def _writes_files(self) -> bool:
        return self.options.save_onnx or self.state.files is not None

    @property
    def _keeps_casts(self) -> bool:
        """Tell whether the bits are to be eager PyTorch's."""
        return {*OWN_KERNELS} <= {*self.options.disable}

    @property
    def _asks_for_names(self) -> bool:
        return self._writes_files or self.state.names_inputs or self.options.print_input_density

    def compile(
        self,
        module: torch.nn.Module,
        inputs: Sequence[Any],
        sources: Callable[[], Sequence[onnx_files.Source | None]],
    ) -> Any:
        """Give a callable for a module with flat inputs; `sources` describes these for saved files.

        Raises Unsupported or InternalError; whatever AOTAutograd itself cannot trace becomes
        Unsupported.
        """
        backend = graph_compat.aot_autograd(
            fw_compiler=self.compile_forward,
            bw_compiler=self.compile_backward,
            inference_compiler=self.compile_inference,
            partition_fn=self.partition,
            keep_inference_input_mutations=True,
        )
        with self._capturing("aot", sources):
            try:
                with (
                    operators_whole(),
                    sparse_gradients_whole(),
                    attention_chosen(self.options),
                    graph_compat.backward_without_autocast(),
                    trace_compat.anomalies_unsaid(),
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
        if self._forward is None:
            return compiled
        return RefusingStep(compiled, self.state, self._forward, self._states)

    def record(
        self,
        function: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        sources: Callable[[], Sequence[onnx_files.Source | None]],
        plain: Callable[..., Sequence[Any]],
        is_settled: Callable[[], bool] = lambda: True,
        new_size: NewSize | None = None,
    ) -> Callable[..., Sequence[Any]]:
        """Give a callable for a function of flat inputs, by the recorder.

        `plain` is the same function as eager PyTorch runs it, on real inputs; `new_size` makes
        the symbol of a size that only data tells.
        Raises what the function raises, HandOver for what only AOTAutograd can do, Unsupported or
        InternalError for what the engine cannot.
        """
        self._is_recorded = True
        with self._capturing("record", sources):
            with attention_chosen(self.options):
                recording = record(
                    function, inputs, is_settled, self._writes_files, new_size, self._keeps_casts
                )
            self.recording = recording
            self._note_lying(recording.results.addressed, _READS_MEMORY)
            self.lying.update(recording.lying)
            if recording.is_training:
                step = self._training_step(recording, plain)
            else:
                runner = self.compile_inference(recording.module, inputs)
                step = RecordedRun(recording, runner)
        counting.count("graphs_recorded")
        return step

    def _training_step(
        self, recording: Recording, plain: Callable[..., Sequence[Any]]
    ) -> RecordedStep:
        is_one_of_two = recording.inside is not None
        layout = self._compile_joint(
            recording.module, recording.num_outputs, is_one_of_two=is_one_of_two
        )
        again = CallAgain(recording, layout.differentiated)
        twice = DoubleBackward(plain, again, self.state)
        lazy = self.state.programs[-1].lazy_logits
        step = GraphStep(recording, layout, self._forward, twice.key, recording.states, lazy)
        make_inside = self._later(recording, twice.key) if is_one_of_two else None
        return RecordedStep(recording, plain, again, twice, step, make_inside, self.state)

    def _later(self, recording: Recording, key: int) -> Callable[[], GraphStep]:
        """Read the graph for a backward under forward's autocast; what is given compiles it."""
        layout, program = self._read_joint(recording.inside, recording.num_outputs)

        def make() -> GraphStep:
            forward = self._compile_read(layout, program, {}, None, True)
            states = [recording.around]
            return GraphStep(recording, layout, forward, key, states, program.lazy_logits)

        return make

    @contextmanager
    def _capturing(
        self, maker: str, sources: Callable[[], Sequence[onnx_files.Source | None]]
    ) -> Iterator[None]:
        """Capture in the block: count and time it, then free what only files and traces need."""
        dynamo, start = dynamo_compat.dynamo_seconds(), time.perf_counter()
        if self._asks_for_names:
            self._sources = sources()
        try:
            with trace_compat.meta_errors_unsaid():
                yield
        finally:
            self._sources = []  # they hold tensors of the module
            end_of_capture()
        counting.count("graphs_captured")
        self._note_seconds(dynamo, time.perf_counter() - start, maker)

    def _note_seconds(self, dynamo: float | None, spent: float, maker: str) -> None:
        """Tell the first graph what capture took: Dynamo until it called us, the maker alone."""
        ours = sum(sum(program.seconds.values()) for program in self.state.programs)
        for program in self.state.programs[:1]:
            if dynamo is not None:
                program.seconds["dynamo"] = dynamo
            program.seconds[maker] = spent - ours

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
        layout = self._compile_joint(joint, num_fwd_outputs, static_lifetime_input_indices)
        around = autocast.state_now()
        if around and not graph_compat.may_differ_under_autocast(joint, around):
            self._states.append(around)
        session = self._forward.session
        layout.note_saved(session)
        remember_gradients(layout, session)
        return make_stubs(layout, session)

    def _compile_joint(
        self, joint: torch.nn.Module, num_outputs: int, parameters: Sequence[int] | None = None,
        is_one_of_two: bool = False,
    ) -> JointLayout:  # fmt: skip
        self._note_graph(joint.graph)
        layout, program = self._read_joint(joint, num_outputs, parameters)
        sources = self._sources_of(layout.primals)
        self._forward = self._compile_read(
            layout, program, sources, self.state.files, is_one_of_two
        )  # fmt: skip
        self.state.is_repeatable = graph_compat.is_repeatable(joint.graph)
        return layout

    def _read_joint(
        self, joint: torch.nn.Module, num_outputs: int, parameters: Sequence[int] | None = None
    ) -> tuple[JointLayout, Program]:
        with stage("convert"):
            add_as_sparse(joint.graph, num_outputs)
            layout = JointLayout(joint, num_outputs)
            program = read_joint(layout, self.options)
        program.gradient_inputs = layout.gradient_inputs()
        program.can_be_lazy = self._is_recorded
        if "deliver_gradients" not in self.options.disable:
            program.parameter_gradients = layout.gradients_of(
                parameters or self._parameter_positions(layout.primals)
            )
        return layout, program

    def _compile_read(
        self, layout: JointLayout, program: Program, sources: dict[str, onnx_files.Source],
        files: Any, is_one_of_two: bool,
    ) -> ForwardRunner:  # fmt: skip
        session = compiler.compile_program(
            program, self.options, sources, files, self.state.rewrite
        )  # fmt: skip
        self.state.programs.append(program)
        return ForwardRunner(
            layout, session, self.options, self.state, program.recomputation,
            input_density(layout.joint.graph, layout.primals, sources)
            if self.options.print_input_density else None, is_one_of_two,
        )  # fmt: skip

    def _note_graph(self, graph: fx.Graph) -> None:
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
            self._note_lying(graph_compat.inputs_that_order_draws(graph), _DRAWS_IN_ORDER)
        self._note_lying(graph_compat.addressed_inputs(graph), _READS_MEMORY)

    def note_given_back(self, positions: set[int]) -> None:
        """Note the inputs that results are, or are views of, where AOTAutograd makes them."""
        self._note_lying(positions, _GIVES_BACK)

    def _note_lying(self, positions: set[int], why: str) -> None:
        self.lying.update(dict.fromkeys(positions, why))

    def compile_forward(self, stub: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Give what runs instead of the forward stub."""
        return self._forward

    def compile_backward(self, stub: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Give what runs instead of the backward stub; here is too late to fall back."""
        return self._forward.backward

    def compile_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph without gradients."""
        self._note_graph(module.graph)
        with stage("convert"):
            add_as_sparse(module.graph)
            program, outputs = read_inference(module, self.options)
        program.can_be_lazy = self._is_recorded
        placeholders = module.graph.find_nodes(op="placeholder")
        sources = self._sources_of(placeholders)
        session = compiler.compile_program(
            program, self.options, sources, self.state.files, self.state.rewrite
        )
        self.state.programs.append(program)
        self.state.is_repeatable = graph_compat.is_repeatable(module.graph)
        written = graph_compat.written_placeholders(module.graph)
        positions = [i for i, node in enumerate(placeholders) if node in written]
        return InferenceRunner(program, session, outputs, positions, self.state)

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


def hand_over(error: Exception, is_bug: bool = False) -> None:
    """Count a capture that is left to AOTAutograd, and log why."""
    counting.count("recordings_handed_over")
    if is_bug:
        counting.count("recorder_bugs")
    log_hand_over(error, is_bug)


def record_or_hand_over(make: Callable[[], Any], state: GraphState) -> Any:
    """Give what `make` records; None where that is left to AOTAutograd, or switched off.

    An error of the function itself comes again from there. One of ours is a bug, which `strict`
    raises.
    """
    if "recorder" in state.options.disable:
        return None

    def instead(failure: Failure) -> None:
        is_bug = not is_reason_to_hand_over(failure.error)
        if isinstance(failure.error, NoCapture) or (is_bug and state.options.strict):
            raise failure.error
        hand_over(failure.error, is_bug)
        state.programs.clear()

    return within_boundary(make, instead, "capture")
