"""Capture of a module without Dynamo: its own forward runs once on tensors without data.

All sizes of all tensors that a call brings are symbols, and integers too. What was decided on the
way (attributes read, modes of PyTorch, conditions on sizes) is guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.capture.captured_module import ModuleCapture
from torch_ort.capture.graphs import GraphCompiler
from torch_ort.capture.module_function import ModuleFunction, PlainCall, describe_call
from torch_ort.capture.module_state import ModuleState
from torch_ort.capture.open_numbers import OpenNumbers
from torch_ort.capture.recorded import record_and_compile, record_or_hand_over
from torch_ort.capture.traced import trace_and_compile
from torch_ort.core.refusals import (
    GatheredInside,
    HandOver,
    NestedTensor,
    NoCapture,
    blamed_on_forward,
)
from torch_ort.functions.capturing import Policy, kept_whole
from torch_ort.functions.describe import is_python_op
from torch_ort.functions.eager_modules import eager_modules_whole
from torch_ort.functions.recurrent import recurrent_layers_whole
from torch_ort.guards.hooks import (
    gathered_part,
    hook_with_effects,
    is_parallel,
    tensor_hooks_refused,
)
from torch_ort.guards.number_places import NumberPlace, is_number
from torch_ort.guards.python_draws import DrawsUnclear, watched_draws
from torch_ort.guards.watch import Reads, Watch, all_reads, recorded_reads, unchanged_attributes
from torch_ort.pytorch.dispatch_compat import outside_inference_mode
from torch_ort.pytorch.dynamo_compat import is_refused_by_dynamo, passes_through
from torch_ort.pytorch.trace_compat import FakeInputs, values_unchecked
from torch_ort.record.recorder import RecordedInputs, Recording
from torch_ort.script.replay import Replay, replayed
from torch_ort.steps.state import GraphState

_GIVES_BACK = "forward gives an argument back, or a view of it, that is not dense"


def capture_module(
    module: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    state: GraphState,
    *,
    numbers: frozenset[str] = frozenset(),
    places: Sequence[NumberPlace] = (),
    are_fixed: bool = False,
    run: Callable[..., Any] | None = None,
    functions: Policy | None = None,
    is_inside: bool = False,
) -> ModuleCapture:
    """Capture a module for calls like the given one, of any sizes unless these `are_fixed`.

    Where the recorder hands over to AOTAutograd, sizes of 0 and 1 are fixed in any case.
    `numbers` names the arguments, and `places` are the attributes, that hold numbers which each
    call brings, instead of constants of the graph; `run` is called instead of the module, inside of
    its own hooks if it `is_inside`; `functions` says which torch.autograd.Functions become
    PythonOps.
    Raises UnknownType for arguments that are no tensors, numbers or containers of them; Unsupported
    or InternalError for what cannot be captured, an error of the module itself included.
    """
    check_kind(module, is_inside)
    call = _Call(module, run or module, args, kwargs, numbers, places, functions or Policy())
    try:
        return _record_or_trace(call, state, are_fixed)
    except DrawsUnclear as unclear:
        with watched_draws(unclear):
            return _record_or_trace(call, state, are_fixed)


def _record_or_trace(call: _Call, state: GraphState, are_fixed: bool) -> ModuleCapture:
    capture = record_or_hand_over(lambda: _record(call, state, are_fixed), state)
    if capture is not None:
        return capture
    if call.places:  # a tensor in place of an attribute would take other branches than a number
        raise NoCapture("numbers of attributes are constants where the recorder cannot capture")
    try:
        return _capture(call, state, FakeInputs(are_fixed), recorded_reads)
    except Exception as error:
        # Dynamo cannot see through the recorder of reads.
        if not is_refused_by_dynamo(error):
            raise
    return _capture(call, state, FakeInputs(are_fixed), all_reads)


def _record(call: _Call, state: GraphState, are_fixed: bool) -> ModuleCapture:
    given = RecordedInputs(are_fixed)
    try:
        return _capture(call, state, given, recorded_reads)
    except Exception as error:
        if not given.has_ones or isinstance(error, HandOver | _C.Error):
            raise
        # PyTorch compares sizes with 1 where only the layout depends on it, and where it is the
        # number of channels: a symbol is another size to the former, and so to the latter.
        state.programs.clear()
    return _capture(call, state, RecordedInputs(fixes_ones=True), recorded_reads)


class _Call(NamedTuple):
    """What is captured: a call of a module, by `run`."""

    module: torch.nn.Module
    run: Callable[..., Any]
    args: tuple
    kwargs: dict
    numbers: frozenset[str]
    places: Sequence[NumberPlace]
    functions: Policy


class _Watching(NamedTuple):
    """What watches a module while it is captured."""

    replay: Replay
    reads: Reads
    watch: Watch
    written_outside: Sequence[torch.Tensor]  # by modules that stay in eager PyTorch


@contextmanager
def _watching(
    call: _Call, held: ModuleState, fakes: FakeInputs | RecordedInputs,
    reading: Callable[..., Any],
) -> Iterator[_Watching]:  # fmt: skip
    """Capture in the block: what the module does there has no effect, and is noted."""
    module = call.module
    with (
        blamed_on_forward(),
        outside_inference_mode(),
        held.without_gradients(),
        fakes.tracing(),
        replayed(module, fakes) as replay,
        reading(module) as reads,
        unchanged_attributes(module) as watch,
        kept_whole(call.functions),
        recurrent_layers_whole(),
        eager_modules_whole(module) as written_outside,
        tensor_hooks_refused(),
        values_unchecked(),
    ):
        yield _Watching(replay, reads, watch, written_outside)


def _capture(
    call: _Call, state: GraphState, fakes: FakeInputs | RecordedInputs, reading: Callable[..., Any]
) -> ModuleCapture:
    """Capture by the recorder, or by AOTAutograd: the kind of the inputs decides."""
    is_recorded = isinstance(fakes, RecordedInputs)
    held = ModuleState(call.module)
    held.check()
    numbers = OpenNumbers(call.places)
    inputs = describe_call(
        call.module, call.args, numbers.brought_by(call.kwargs), held, call.numbers | numbers.names,
        is_recorded,
    )  # fmt: skip
    with _watching(call, held, fakes, reading) as around:
        function = ModuleFunction(
            call.run, held, inputs, fakes, around.watch, around.replay, numbers, around.reads
        )
        plain = PlainCall(function)
        first = len(function.open_integers)
        parameters = frozenset(range(first, first + len(held.tensors)))
        compiler = GraphCompiler(state, parameters)
        if is_recorded:
            run, recording = _recorded(compiler, function, plain, fakes, around)
            # Autograd watches none of them.
            written, switched = dict.fromkeys(recording.written, False), recording.switched
        else:
            run, written = _traced(compiler, function, fakes, around)
            switched = {}
    _check_constants(state)
    # Dynamo has traced the bodies of the operators, and reads there were not recorded.
    if compiler.has_higher_order:
        around.reads.add_all()
    rows = [
        row
        for row in around.reads.rows() + around.replay.rows()
        if not numbers.is_open(row[0], row[1])
    ]
    guard = _C.CallGuard(inputs.description[3], held.places, rows)
    for i in written.keys() & parameters:
        tensor = held.tensors[i - first]
        if written[i] and tensor.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"forward writes into '{held.names[i - first]}', which requires grad")
    offset = len(function.integers) - first
    written = {i + offset: watched for i, watched in written.items() if i not in parameters}
    switched = {i + offset: is_set for i, is_set in switched.items()}
    uncopied = {i + offset: why for i, why in compiler.uncopied.items() if i not in parameters}
    function.forget()
    plain.settle(function, guard)
    conditions = function.conditions(fakes)
    return ModuleCapture(
        function,
        guard,
        run,
        conditions,
        written,
        switched,
        uncopied,
        around.reads.unseen,
        _numbers_in(rows),
    )


def _recorded(
    compiler: GraphCompiler, function: ModuleFunction, plain: PlainCall, inputs: RecordedInputs,
    around: _Watching,
) -> tuple[Callable[..., Sequence[Any]], Recording]:  # fmt: skip
    """Capture by the recorder; give what runs, and what was recorded."""
    try:
        recording, run = record_and_compile(
            compiler, function, function.flat, function.sources, plain,
            lambda: not around.watch.has_assigned(), inputs.new_size,
        )  # fmt: skip
    except NestedTensor as error:
        raise NoCapture(
            "forward makes nested tensors, whose row lengths are data; pad the rows to one "
            "length, or use torch.compile"
        ) from error
    if not recording.is_like_first:
        around.watch.raise_for_first_call()
    _check_readers(recording, function, around.written_outside)
    return run, recording


def _traced(
    compiler: GraphCompiler, function: ModuleFunction, inputs: FakeInputs, around: _Watching
) -> tuple[Callable[..., Sequence[Any]], dict[int, bool]]:
    """Capture by AOTAutograd; give what runs, and for inputs written into if autograd watches."""
    try:
        run = trace_and_compile(compiler, function, function.flat, function.sources)
    except Exception as error:
        if not passes_through(error):
            raise
        words = "AOTAutograd: asks Dynamo to trace again, which a module's capture does without"
        raise Unsupported(f"{words}: {type(error).__name__}") from error
    around.watch.refuse_first_call(around.reads)
    compiler.keep_uncopied(inputs.given_back(), _GIVES_BACK)
    return run, inputs.written()


def _check_constants(state: GraphState) -> None:
    """Raise Unsupported for a constant that would get a gradient in eager PyTorch."""
    constants = [each for program in state.programs for each in program.constants.values()]
    if any(constant.requires_grad for constant in constants):
        raise Unsupported(
            "forward reads a tensor that requires grad and is no parameter, buffer or "
            "attribute of the module, so its gradient would be lost; make it one of these, "
            "or pass it as an argument"
        )


def _check_readers(
    recording: Recording, function: ModuleFunction, written: Sequence[torch.Tensor]
) -> None:
    """Raise NoCapture if a graph reads what a module that stays in eager PyTorch writes into.

    The graph would not know whether it comes before or after.
    """
    inputs = recording.module.graph.find_nodes(op="placeholder")
    held, first = function.held, len(function.open_integers)
    for i, tensor in enumerate(held.tensors):
        is_written = any(tensor is each for each in written)
        if is_written and not all(is_python_op(user.target) for user in inputs[first + i].users):
            raise NoCapture(
                f"forward reads '{held.names[i]}', which an embedding with max_norm writes into"
            )


def _numbers_in(rows: Sequence[tuple]) -> list[tuple[NumberPlace, int | float]]:
    """Give the numbers that a graph has taken for constants."""
    return [
        (NumberPlace(entries, name, words), value)
        for entries, name, how, value, words in rows
        if how == "equals" and is_number(value) and type(entries) is dict
    ]


HOOKS_RUN = "which may do more than compute: a captured graph would not run it at every call"


def check_kind(module: torch.nn.Module, is_inside: bool) -> None:
    """Raise Unsupported for what does more in backward, or around forward, than a graph can.

    Hooks around the module's own forward do not count if the capture `is_inside` of them.
    """
    gathered = gathered_part(module)
    if gathered:
        raise GatheredInside(
            f"DeepSpeed's ZeRO stage 3 gathers the parameters of module '{gathered}' around its "
            "own calls, which a captured graph does not make"
        )
    for path, part in module.named_modules():
        name = f"module '{path}'" if path else "the module"
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            raise Unsupported(
                f"{name} is a DistributedDataParallel: wrap its inner module first, and then that "
                "in a DistributedDataParallel"
            )
        if is_parallel(part):
            raise Unsupported(
                f"{name} is split over ranks (parallelize_module), which an ORTModule does not "
                "capture; use torch.compile(model, backend='ort')"
            )
        is_around = part is module and is_inside
        if not is_around and (part._backward_hooks or part._backward_pre_hooks):
            raise Unsupported(f"{name} has backward hooks, which a captured graph would not call")
    hook = hook_with_effects(module, of_parts_alone=is_inside)
    if hook is not None:
        # The parts of a module can be captured without these hooks, which fully_shard runs around
        # them.
        with blamed_on_forward() if hook.is_of_shards else nullcontext():
            raise Unsupported(f"{hook.words}, {HOOKS_RUN}")
