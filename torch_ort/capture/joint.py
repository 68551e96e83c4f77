"""Capture through AOTAutograd: our partition function hands the joint graph whole to the engine.

What AOTAutograd gets back are two stubs that carry metadata, and two callables behind them.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_ort import _C, compiler, counting, onnx_files
from torch_ort._C import Unsupported
from torch_ort.capture import aot_compat
from torch_ort.capture.answers import HandOver, NoCapture
from torch_ort.capture.dispatch_compat import operators_whole, outside_inference_mode
from torch_ort.capture.double_backward import DoubleBackward, RefusingStep
from torch_ort.capture.dynamo_inputs import DynamoInputs
from torch_ort.capture.fx_reader import FxReader, line_of
from torch_ort.capture.recorded_step import RecordedRun, RecordedStep
from torch_ort.capture.recorder import (
    Recording,
    at_line,
    enters_program,
    is_reason_to_hand_over,
    log_hand_over,
    record,
)
from torch_ort.capture.symbols import Symbolic, symbol_name
from torch_ort.fallback import Failure, asked_for, failure_of, stage, warn, within_boundary
from torch_ort.functions.call import end_of_capture
from torch_ort.generators import TorchGenerators
from torch_ort.options import Options
from torch_ort.user_code import blame


@dataclass
class GraphState:
    """What the pieces of one captured graph tell each other."""

    options: Options
    files: Any = None  # of an ORTModule: writes graphs and plans
    rewrite: Callable[[_C.Graph], _C.Graph] | None = None  # of an ORTModule: the user's passes
    failed: bool = False  # a backward failed: eager from now on
    is_differentiated_twice: bool = False  # which is how it has failed
    is_repeatable: bool = False  # running again changes nothing: no writes, no random numbers
    programs: list[compiler.Program] = field(default_factory=list)
    # What a first run writes into, with copies from before; None once such a run has succeeded.
    written: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def note_first_run(self) -> None:
        """Write what only a run can tell; called when a first run has succeeded."""
        with asked_for():
            if "plan" in self.options.dump:
                for program in self.programs:
                    compiler.write_plan(program, self.options)
            if self.files is not None:
                for program in self.programs:
                    self.files.write_run(program)


_DATA_IS_ASKED = (
    "data-dependent: Python asks for a number in a tensor (a branch, float(), item()), which a "
    "captured graph does not know"
)

_READS_MEMORY = "forward reads the memory of an argument that is not dense (as_strided)"
_GIVES_BACK = "forward gives an argument back, or a view of it, that is not dense"
_DRAWS_IN_ORDER = "forward draws numbers as an argument lies in memory that is not dense"


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
        # Inputs that no copy may stand for which lies otherwise in memory, and why.
        self.lying: dict[int, str] = {}
        self._parameters = parameters
        self.recording: Recording | None = None
        self._forward: ForwardRunner | None = None
        self._sources: Sequence[onnx_files.Source | None] = []  # of the inputs, for files

    @property
    def _writes_files(self) -> bool:
        return self.options.save_onnx or self.state.files is not None

    def compile(
        self,
        module: torch.nn.Module,
        inputs: Sequence[Any],
        sources: Callable[[], Sequence[onnx_files.Source | None]],
    ) -> Any:
        """Give a callable for a module with flat inputs; `sources` tells files what these are.

        Raises Unsupported or InternalError; whatever AOTAutograd itself cannot trace becomes
        Unsupported.
        """
        backend = aot_compat.aot_autograd(
            fw_compiler=self.compile_forward,
            bw_compiler=self.compile_backward,
            inference_compiler=self.compile_inference,
            partition_fn=self.partition,
            keep_inference_input_mutations=True,
        )
        with self._capturing("aot", sources):
            try:
                with operators_whole():
                    compiled = backend(module, inputs)
            except _C.Error:
                raise
            except Exception as error:
                if aot_compat.passes_through(error):
                    raise
                if aot_compat.data_is_asked(error):
                    raise Unsupported(_DATA_IS_ASKED) from error
                blame(error, *aot_compat.node_that_raised(error))
                raise Unsupported(f"AOTAutograd: {type(error).__name__}: {error}") from error
        return compiled if self._forward is None else RefusingStep(compiled, self.state)

    def record(
        self,
        function: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        sources: Callable[[], Sequence[onnx_files.Source | None]],
        plain: Callable[..., Sequence[Any]],
        is_settled: Callable[[], bool] = lambda: True,
    ) -> Callable[..., Sequence[Any]]:
        """Give a callable for a function of flat inputs, by the recorder.

        `plain` is the same function as eager PyTorch runs it, on real inputs.
        Raises what the function raises, HandOver for what only AOTAutograd can do, Unsupported or
        InternalError for what the engine cannot.
        """
        with self._capturing("record", sources):
            recording = self.recording = record(function, inputs, is_settled, self._writes_files)
            self._note_lying(recording.results.addressed, _READS_MEMORY)
            self.lying.update(recording.lying)
            if recording.is_training:
                layout = self._compile_joint(recording.module, recording.num_outputs)
                twice = DoubleBackward(plain, recording, layout.differentiated, self.state)
                step = RecordedStep(recording, layout, self._forward, twice)
            else:
                runner = self.compile_inference(recording.module, inputs)
                step = RecordedRun(recording, runner)
        counting.count("graphs_recorded")
        return step

    @contextmanager
    def _capturing(
        self, maker: str, sources: Callable[[], Sequence[onnx_files.Source | None]]
    ) -> Iterator[None]:
        """Capture in here: count and time it, and let go of what only files and traces need."""
        dynamo, start = aot_compat.dynamo_seconds(), time.perf_counter()
        if self._writes_files:
            self._sources = sources()
        try:
            with aot_compat.meta_errors_unsaid():
                yield
        finally:
            self._sources = []  # they hold the module's tensors
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
        if not joint_inputs:  # the body of a nested_compile_region, before its outer graph
            return aot_compat.default_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=static_lifetime_input_indices, **unused
            )  # fmt: skip
        layout = self._compile_joint(joint, num_fwd_outputs, static_lifetime_input_indices)
        session = self._forward.session
        layout.note_saved(session)
        _gradient_fakes[session.id] = [node.meta["val"] for node in layout.gradient_layout.tensors]
        return make_stubs(layout, session)

    def _compile_joint(
        self, joint: torch.nn.Module, num_outputs: int, parameters: Sequence[int] | None = None
    ) -> JointLayout:
        self._note_graph(joint.graph)
        with stage("convert"):
            layout = JointLayout(joint, num_outputs)
            program = read_joint(layout, self.options)
        if "deliver_gradients" not in self.options.disable:
            program.parameter_gradients = layout.gradients_of(
                parameters or self._parameter_positions(layout.primals)
            )
        sources = self._sources_of(layout.primals)
        session = compiler.compile_program(
            program, self.options, sources, self.state.files, self.state.rewrite
        )
        self.state.programs.append(program)
        self.state.is_repeatable = aot_compat.is_repeatable(joint.graph)
        self._forward = ForwardRunner(layout, session, self.options, self.state)
        return layout

    def _note_graph(self, graph: fx.Graph) -> None:
        if aot_compat.writes_into_windows(graph):
            raise NoCapture(
                "forward writes into what unfold gave, for which PyTorch's functionalization "
                "zeroes what the windows leave out"
            )
        self.has_higher_order = aot_compat.has_higher_order(graph)
        if self.options.exact_random:
            self._note_lying(aot_compat.inputs_that_order_draws(graph), _DRAWS_IN_ORDER)
        self._note_lying(aot_compat.addressed_inputs(graph), _READS_MEMORY)

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
            program, outputs = read_inference(module, self.options)
        placeholders = module.graph.find_nodes(op="placeholder")
        sources = self._sources_of(placeholders)
        session = compiler.compile_program(
            program, self.options, sources, self.state.files, self.state.rewrite
        )
        self.state.programs.append(program)
        self.state.is_repeatable = aot_compat.is_repeatable(module.graph)
        written = aot_compat.written_placeholders(module.graph)
        positions = [i for i, node in enumerate(placeholders) if node in written]
        return InferenceRunner(program, session, outputs, positions, self.state)

    def _parameter_positions(self, primals: Sequence[fx.Node]) -> list[int]:
        return [
            i
            for i, node in enumerate(primals)
            if aot_compat.input_position(node) in self._parameters
        ]

    def _sources_of(self, placeholders: Sequence[fx.Node]) -> dict[str, onnx_files.Source]:
        """Tell where inputs and symbols come from, by their names in the engine."""
        sources = {}
        for node in placeholders:
            position = aot_compat.input_position(node)
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


class _Lines(fx.Interpreter):
    """Runs a graph of Dynamo's, and tells the recorder the user's line of each node."""

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
    """Give a callable for a graph of Dynamo's, by the recorder.

    Raises HandOver for what only AOTAutograd does.
    """
    if aot_compat.calls_transforms(module.graph):
        raise HandOver("the graph calls operators that take graphs, or transforms of torch.func")
    kept = aot_compat.kept_inputs(module.graph)
    capture = Capture(state.options, state, kept)
    with outside_inference_mode():
        given = DynamoInputs(aot_compat.symbolic_inputs(module.graph, inputs))
        step = capture.record(_Lines(module).run, given.inputs, sources, module.forward)
    written = set(capture.recording.written) - kept
    if written:  # later calls may bring tensors that share memory
        raise HandOver(f"input {min(written)}, which the caller brings, is written into")
    given.tell_guards()
    return step


_gradient_fakes: dict[int, list[torch.Tensor]] = {}


def release_fakes() -> None:
    """Forget what compiled autograd is told of gradients; called when compiled code is reset."""
    _gradient_fakes.clear()


@torch.library.register_fake("torch_ort::run_backward")
def _fake_backward(
    session: int, token: torch.Tensor, saved: list[torch.Tensor], tangents: list[torch.Tensor]
) -> list[torch.Tensor]:
    fakes = _gradient_fakes.get(session)
    if fakes is None or any(isinstance(n, torch.SymInt) for fake in fakes for n in fake.shape):
        raise Unsupported("compiled autograd: sizes of gradients are known at run time only")
    return [
        torch.empty_strided(
            fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device
        ) for fake in fakes
    ]  # fmt: skip


class OutputLayout:
    """Which outputs are tensors, which sizes (0-d tensors in the engine) and which constants."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.names: list[str] = []  # of the engine's outputs
        self.sizes: list[tuple[str, fx.Node]] = []  # to be made in the graph
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
            else:
                raise Unsupported(
                    f"output {i}: got {type(value).__name__}, want a tensor or an integer"
                )

        self.are_tensors = all(kind == "tensor" for kind, _ in self._kinds)

    def engine_index(self, position: int) -> int | None:
        """Position among the engine's outputs; None for a constant."""
        kind, what = self._kinds[position]
        return None if kind == "constant" else what

    def resolve(self, reader: FxReader) -> list[str]:
        """Make the sizes in the graph; give the engine's names of all its outputs."""
        for name, node in self.sizes:
            reader.add_size_as_tensor(name, node)
        return [
            reader.value_name(item) if isinstance(item, fx.Node) else item for item in self.names
        ]

    def assemble(self, results: Sequence[torch.Tensor]) -> list[Any]:
        """Put the engine's outputs where AOTAutograd expects them."""
        outputs: list[Any] = []
        for kind, what in self._kinds:
            if kind == "tensor":
                outputs.append(results[what])
            else:
                outputs.append(results[what].item() if kind == "size" else what)
        return outputs


class JointLayout:
    """Where everything stands in a joint graph, and in the argument lists of its stubs."""

    def __init__(self, joint: fx.GraphModule, num_forward_outputs: int) -> None:
        self.joint = joint
        self.primals, self.tangents = aot_compat.split_placeholders(joint)
        output = next(node for node in joint.graph.nodes if node.op == "output")
        self.forward_outputs = list(output.args[0][:num_forward_outputs])
        self.gradients = list(output.args[0][num_forward_outputs:])
        self.outputs = OutputLayout(self.forward_outputs)
        self.gradient_layout = OutputLayout(self.gradients)
        # Which inputs the engine's gradients are of.
        self.differentiated = [
            i
            for i in range(len(self.gradients))
            if self.gradient_layout.engine_index(i) is not None
        ]
        if self.gradient_layout.sizes:
            raise Unsupported("gradients: got a size, want tensors")
        for tangent in self.tangents:
            if not isinstance(tangent.meta.get("val"), torch.Tensor):
                raise Unsupported(f"gradient {tangent.name}: got no tensor")
        self.saved: list[fx.Node] = []
        self.order: list[int] = []  # position of the engine's saved tensors among `saved`
        self.tensor_inputs: list[int] = []
        self.symbol_inputs: list[int] = []
        written = aot_compat.written_placeholders(joint.graph)
        self.written = [i for i, node in enumerate(self.primals) if node in written]

    def gradients_of(self, primals: Sequence[int]) -> list[int]:
        """Give the positions, among the engine's gradients, of those of some primals."""
        wanted = {self.primals[i] for i in primals}
        differentiated = aot_compat.differentiated(self.joint, len(self.forward_outputs))
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
        self.saved = sorted(engine_order, key=aot_compat.needs_no_version_check)
        self.order = [self.saved.index(node) for node in engine_order]
        self.to_saved = [engine_order.index(node) for node in self.saved]


def read_joint(layout: JointLayout, options: Options) -> compiler.Program:
    """Turn a joint FX graph into a training graph with its YieldOp."""
    reader = FxReader(layout.joint, "training", options.opset)
    reader.add_placeholders(layout.primals)
    forward, backward = aot_compat.forward_and_backward_nodes(layout.joint, layout.forward_outputs)
    reader.add_nodes(forward)
    names = layout.outputs.resolve(reader)
    reader.add_yield_nodes(names, layout.tangents)
    reader.add_nodes(backward)
    reader.reader.set_outputs(layout.gradient_layout.resolve(reader))
    layout.tensor_inputs = reader.tensor_inputs
    layout.symbol_inputs = reader.symbol_inputs
    return _program(reader, is_training=True)


def read_inference(
    module: fx.GraphModule, options: Options
) -> tuple[compiler.Program, OutputLayout]:
    """Turn an FX graph without gradients into a graph."""
    reader = FxReader(module, "inference", options.opset)
    nodes = list(module.graph.nodes)
    reader.add_placeholders([node for node in nodes if node.op == "placeholder"])
    reader.add_nodes([node for node in nodes if node.op not in ("placeholder", "output")])
    outputs = OutputLayout(list(nodes[-1].args[0]))
    reader.reader.set_outputs(outputs.resolve(reader))
    return _program(reader, is_training=False), outputs


def _program(reader: FxReader, is_training: bool) -> compiler.Program:
    graph = reader.reader.take()
    seconds = {"read": time.perf_counter() - reader.started}
    return compiler.Program(
        graph, reader.constants, is_training, reader.tensor_inputs, reader.symbol_inputs,
        seconds=seconds, functions=reader.functions,
    )  # fmt: skip


def make_stubs(layout: JointLayout, session: _C.Session) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Give graphs that look like the two halves: the metadata is what AOTAutograd reads."""
    token_meta = {"val": aot_compat.fake_token(layout.primals)}

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
            outputs.append(output if not isinstance(output, fx.Node) else None)
            continue
        if output not in made:
            # A hook that is a graph finds saved values by name, which must agree in both stubs.
            name = output.name if output not in inputs else f"{output.name}_out"
            made[output] = item(graph, call, index, name, output.meta)
        outputs.append(made[output])
    token = item(graph, call, session.num_outputs, "token", token_meta)
    saved = [inputs[node] if node in inputs else made[node] for node in layout.saved]
    graph.output((*outputs, token, *saved))
    forward = fx.GraphModule(layout.joint, graph)

    graph = fx.Graph()
    token = graph.placeholder("token")
    token.meta = dict(token_meta)
    saved = [placeholder(graph, node) for node in layout.saved]
    tangents = [placeholder(graph, node) for node in layout.tangents]
    call = graph.call_function(
        torch.ops.torch_ort.run_backward.default, (session.id, token, saved, tangents)
    )
    gradients = []
    for i, gradient in enumerate(layout.gradients):
        index = layout.gradient_layout.engine_index(i)
        gradients.append(
            None if index is None else item(graph, call, index, f"gradient_{i}", gradient.meta)
        )
    graph.output(tuple(gradients))
    return forward, fx.GraphModule(layout.joint, graph)


class ForwardRunner:
    """Runs instead of the forward stub; `backward` runs instead of the other one."""

    def __init__(
        self, layout: JointLayout, session: _C.Session, options: Options, state: GraphState
    ) -> None:
        self._boxed_call = True  # of the instance: AOTAutograd copies it from there
        self._layout = layout
        self.session = session
        self._state = state
        self._saved_inputs = session.saved_inputs
        self._saved_outputs = session.saved_outputs
        self.first_backward = None if options.strict else FirstBackward(layout, state)
        self.backward = BackwardRunner(self)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the forward half; clears `args`."""
        layout = self._layout
        tensors = [args[i] for i in layout.tensor_inputs]
        symbols = [args[i] for i in layout.symbol_inputs]
        kept = self.note_call(args)
        args.clear()
        results = _C.run_forward(
            self.session.id, tensors, symbols, aot_compat.saved_tensor_hooks_copy()
        )
        token = results.pop()
        saved = [tensors[i] for i in self._saved_inputs]
        saved += [results[i] for i in self._saved_outputs]
        if kept is not None:
            self.first_backward.after_forward(token, kept)
        return [*layout.outputs.assemble(results), token, *(saved[i] for i in layout.to_saved)]

    def note_call(self, args: Sequence[Any]) -> _Kept | None:
        """Remember what a first run writes into, and what running a call again would need.

        None once the latter is not needed.
        """
        guard = self.first_backward
        kept = guard.before_forward(args) if guard else None
        if self._state.written is not None:
            self._state.written += [
                (args[i], kept.inputs[i] if kept is not None else args[i].detach().clone())
                for i in self._layout.written
            ]
        return kept


class BackwardRunner:
    """Runs instead of the backward stub: token, saved tensors, gradients of the outputs."""

    def __init__(self, forward: ForwardRunner) -> None:
        self._boxed_call = True
        self._forward = forward

    def __deepcopy__(self, memo: dict) -> BackwardRunner:
        return self

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the backward half; clears `args`."""
        layout = self._forward._layout
        guard = self._forward.first_backward
        token, count = args[0], len(layout.saved)
        given, tangents = args[1 : 1 + count], args[1 + count :]
        args.clear()
        saved = [given[i] for i in layout.order]
        if torch.compiler.is_compiling():  # compiled autograd: one opaque operator
            gradients = torch.ops.torch_ort.run_backward(
                self._forward.session.id, token, saved, tangents
            )
        elif guard is None or guard.proven:
            gradients = _C.run_backward(token, saved, tangents)
        else:
            gradients = guard.run_backward(token, saved, tangents)
        return layout.gradient_layout.assemble(gradients)


class FirstBackward:
    """Until one backward has succeeded, keeps what a step needs to be run again without the engine.

    Inputs are kept by reference, and checked for edits; those that the graph writes into are
    copied.
    """

    def __init__(self, layout: JointLayout, state: GraphState) -> None:
        self.proven = False
        self._layout = layout
        self._state = state
        self._pending: dict[int, _Kept] = {}

    def before_forward(self, args: Sequence[Any]) -> _Kept | None:
        """Remember a call; None once it is no longer needed."""
        if self.proven:
            return None
        inputs = [
            (arg.detach().clone() if i in self._layout.written else arg.detach())
            if isinstance(arg, torch.Tensor) else arg
            for i, arg in enumerate(args)
        ]  # fmt: skip
        return _Kept(inputs, _versions(inputs), TorchGenerators())

    def after_forward(self, token: torch.Tensor, kept: _Kept) -> None:
        """File what was remembered under its token."""
        for old in [key for key in self._pending if not _C.is_live(key)]:
            del self._pending[old]
        if token.dtype == torch.int64:
            self._pending[int(token)] = kept

    def run_backward(self, token: torch.Tensor, saved: list[Any], tangents: list[Any]) -> list[Any]:
        """Run the first backward; if the engine fails, run the step again node by node."""
        kept = self._pending.get(int(token)) if token.dtype == torch.int64 else None
        try:
            gradients = _C.run_backward(token, saved, tangents)
        except Exception as error:
            if kept is None or kept.was_edited():
                raise
            failure = failure_of(error, "backward")
        else:
            self.proven = True
            self._pending.clear()
            return gradients
        gradients = self._run_again(kept, tangents)  # an error of the program's comes from here
        self._state.failed = True
        warn(failure)
        return gradients

    def _run_again(self, kept: _Kept, tangents: list[Any]) -> list[torch.Tensor]:
        now = TorchGenerators()
        kept.random.restore()
        try:
            with torch.no_grad():
                results = _JointInterpreter(self._layout).run(
                    *kept.inputs, *tangents, enable_io_processing=False
                )
        finally:
            now.restore()
        gradients = results[len(self._layout.forward_outputs) :]
        return [gradients[i] for i in self._layout.differentiated]


@dataclass
class _Kept:
    inputs: list[Any]
    versions: list[int]
    random: TorchGenerators

    def was_edited(self) -> bool:
        return _versions(self.inputs) != self.versions


def _versions(inputs: list[Any]) -> list[int]:
    return [aot_compat.version(x) if isinstance(x, torch.Tensor) else 0 for x in inputs]


class _JointInterpreter(fx.Interpreter):
    """Runs a joint graph without writing into its inputs: the forward call has done that.

    An output without a gradient has None, and so has all that only such outputs reach.
    """

    def __init__(self, layout: JointLayout) -> None:
        super().__init__(layout.joint)
        self._reached = set(layout.tangents)  # by gradients, whether they are there or not

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        given = [node for node in n.all_input_nodes if node in self._reached]
        if given and n.op == "call_function":
            self._reached.add(n)
            if all(self.env[node] is None for node in given):
                return None
        return super().run_node(n)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Give a node's arguments, with zeros where some gradients are there and others are not."""

        def value(node: fx.Node) -> Any:
            found = self.env[node]
            is_missing = found is None and node in self._reached and n.op == "call_function"
            return self._zeros(node.meta["val"]) if is_missing else found

        return fx.node.map_arg(args, value)

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        sizes = [self._value(Symbolic(n)) if isinstance(n, torch.SymInt) else n for n in like.shape]
        return torch.zeros(sizes, dtype=like.dtype, device=like.device)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        """Give a node's arguments; integers over symbols get their values."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return aot_compat.pytree.tree_map_only(Symbolic, self._value, (args, kwargs))

    def _value(self, symbolic: Symbolic) -> int:
        symbols = {
            symbol_name(node.meta["val"]): value
            for node, value in self.env.items()
            if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymInt)
        }
        symbols.pop(None, None)  # of what has turned out to be a number
        return _C.evaluate_size(symbolic.size, symbols)

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is torch.ops.aten.copy_.default:
            return args[0]
        return super().call_function(target, args, kwargs)


class InferenceRunner:
    """Runs a graph without gradients."""

    def __init__(
        self,
        program: compiler.Program,
        session: _C.Session,
        outputs: OutputLayout,
        written: list[int],
        state: GraphState,
    ) -> None:
        self._boxed_call = True
        self._program = program
        self.session = session
        self._outputs = outputs
        self._written = written  # positions of the inputs that the graph writes into
        self._state = state

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the graph; clears `args`."""
        if self._state.written is not None:
            self._state.written += [(args[i], args[i].detach().clone()) for i in self._written]
        tensors = [args[i] for i in self._program.tensor_inputs]
        symbols = [args[i] for i in self._program.symbol_inputs]
        args.clear()
        results = _C.run_forward(self.session.id, tensors, symbols, False)
        return self._outputs.assemble(results)
