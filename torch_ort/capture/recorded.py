"""Capture by the recorder: a function is recorded, and its graph compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch_ort.capture.attention import attention_chosen
from torch_ort.capture.graphs import READS_MEMORY, GraphCompiler, Sources
from torch_ort.capture.second_graphs import SecondGraphs
from torch_ort.core import counting
from torch_ort.core.refusals import NoCapture
from torch_ort.core.switches import OWN_KERNELS
from torch_ort.fallback import Failure, within_boundary
from torch_ort.record.reasons import is_reason_to_hand_over, log_hand_over
from torch_ort.record.recorder import Recording, record
from torch_ort.rules.data_sizes import NewSize
from torch_ort.steps.again import CallAgain
from torch_ort.steps.double_backward import DoubleBackward
from torch_ort.steps.recorded import GraphStep, RecordedRun, RecordedStep
from torch_ort.steps.state import GraphState

Function = Callable[..., Sequence[Any]]  # of flat inputs
_SETS_REQUIRES_GRAD = "forward sets requires_grad of an argument that is not dense"


def record_and_compile(
    compiler: GraphCompiler,
    function: Function,
    inputs: Sequence[Any],
    sources: Sources,
    plain: Function,
    is_settled: Callable[[], bool] = lambda: True,
    new_size: NewSize | None = None,
) -> tuple[Recording, RecordedStep | RecordedRun]:
    """Record a function of flat inputs; give the recording, and what runs instead of the function.

    `plain` is the same function as eager PyTorch runs it, on real inputs; `new_size` makes the
    symbol of a size that only data tells.
    Raises what the function raises, HandOver for what only AOTAutograd can do, Unsupported or
    InternalError for what the engine cannot.
    """
    options = compiler.options
    # Autocast casts as eager PyTorch does where the bits are to be eager PyTorch's.
    keeps_casts = {*OWN_KERNELS} <= {*options.disable}
    with compiler.capturing("record", sources):
        with attention_chosen(options):
            recording = record(
                function, inputs, is_settled, compiler.writes_files, new_size, keeps_casts
            )
        compiler.keep_uncopied(recording.results.addressed, READS_MEMORY)
        compiler.uncopied.update(recording.uncopied)
        compiler.keep_uncopied(set(recording.switched), _SETS_REQUIRES_GRAD)
        if recording.is_training:
            step = _training_step(compiler, recording, plain)
        else:
            runner = compiler.compile_inference(recording.module, can_be_lazy=True)
            step = RecordedRun(recording, runner)
    counting.count("graphs_recorded")
    return recording, step


def _training_step(compiler: GraphCompiler, recording: Recording, plain: Function) -> RecordedStep:
    is_one_of_two = recording.inside is not None
    compiler.check(recording.module.graph)
    graph = compiler.read_joint(recording.module, recording.num_outputs, can_be_lazy=True)
    forward = compiler.compile_joint(graph, is_one_of_two)
    again = CallAgain(recording, graph.layout.differentiated)
    second = SecondGraphs(recording, plain, again, _compile, compiler.state)
    twice = DoubleBackward(plain, again, second, compiler.state)
    lazy = graph.program.lazy_logits
    step = GraphStep(recording, graph.layout, forward, twice.key, recording.states, lazy)
    make_inside = _later(compiler, recording, twice.key) if is_one_of_two else None
    recorded = RecordedStep(recording, plain, again, twice, step, make_inside, compiler.state)
    second.when_used(weakref.WeakMethod(recorded.hold_inputs))
    return recorded


def _compile(
    compiler: GraphCompiler, function: Function, inputs: Sequence[Any], plain: Function
) -> Function:  # fmt: skip
    return record_and_compile(compiler, function, inputs, list, plain)[1]


def _later(compiler: GraphCompiler, recording: Recording, key: int) -> Callable[[], GraphStep]:
    """Read the graph for a backward under forward's autocast; what is given compiles it."""
    graph = compiler.read_joint(recording.inside, recording.num_outputs, can_be_lazy=True)

    def make() -> GraphStep:
        forward = compiler.compile_later(graph)
        lazy = graph.program.lazy_logits
        return GraphStep(recording, graph.layout, forward, key, [recording.around], lazy)

    return make


def hand_over(error: Exception, is_bug: bool = False) -> None:
    """Count a capture that is handed over to AOTAutograd, and log why."""
    counting.count("recordings_handed_over")
    if is_bug:
        counting.count("recorder_bugs")
    log_hand_over(error, is_bug)


def record_or_hand_over(make: Callable[[], Any], state: GraphState) -> Any:
    """Give what `make` records; None where that is handed over to AOTAutograd, or switched off.

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
