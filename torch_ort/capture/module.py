"""Capture of a module without Dynamo: its own forward runs once on tensors without data.

All sizes of all tensors that a call brings are symbols, and integers too. What was decided on the
way (attributes read, modes of PyTorch, conditions on sizes) is guarded.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.capture.assigned_fields import AssignedFields
from torch_ort.capture.joint import Capture, record_or_hand_over
from torch_ort.capture.open_numbers import OpenNumbers
from torch_ort.core.refusals import (
    GatheredInside,
    NestedTensor,
    NoCapture,
    blamed_on_forward,
)
from torch_ort.engine import onnx_files
from torch_ort.functions.capturing import Policy, kept_whole
from torch_ort.functions.describe import is_python_op
from torch_ort.functions.eager_modules import eager_modules_whole
from torch_ort.functions.recurrent import recurrent_layers_whole
from torch_ort.guards.hooks import gathered_part, hook_with_effects, tensor_hooks_refused
from torch_ort.guards.number_places import NumberPlace, is_number
from torch_ort.guards.scripts import is_script, script_object, signature_of
from torch_ort.guards.structure import Structure, is_dense, plain_parameter
from torch_ort.guards.watch import (
    Reads,
    Watch,
    all_reads,
    containers_in,
    recorded_reads,
    unchanged_attributes,
)
from torch_ort.options import Options
from torch_ort.pytorch.dispatch_compat import outside_inference_mode
from torch_ort.pytorch.dynamo_compat import is_refused_by_dynamo, passes_through
from torch_ort.pytorch.generators import DrawsNoted, watched_seeding
from torch_ort.pytorch.trace_compat import FakeInputs, values_unchecked
from torch_ort.record.recorder import RecordedInputs, Recording, enters_program
from torch_ort.rules.numbers import Conditions, number_for, number_tensor
from torch_ort.rules.symbols import symbol_name
from torch_ort.script.replay import Replay, replayed
from torch_ort.steps.recorded import RecordedRun, RecordedStep
from torch_ort.steps.state import GraphState

# Held while the tensors of a module are replaced by others, which other threads must not see.
hanging_others = threading.RLock()


class ModuleState:
    """The tensors of a tree of modules, each once, with all attributes that hold it.

    Parameters, buffers, and tensors in plain attributes or in lists and dicts there: all are inputs
    of a graph, so that what they hold, and gradients, are right at every call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.places: list[tuple[Any, Any, int]] = []  # container, key, position
        positions: dict[int, int] = {}
        for path, part in module.named_modules():
            for container, label in _containers(part):
                for key in _keys(container):
                    tensor = container[key]
                    if not isinstance(tensor, torch.Tensor):
                        continue
                    if id(tensor) not in positions:
                        positions[id(tensor)] = len(self.tensors)
                        self.tensors.append(tensor)
                        self.names.append(".".join(filter(None, (path, label, _key_name(key)))))
                    self.places.append((container, key, positions[id(tensor)]))

    def check(self) -> None:
        """Raise Unsupported unless all are plain tensors."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if not plain_parameter(tensor):
                raise Unsupported(
                    f"tensor '{name}' of the module is a {type(tensor).__name__} of layout "
                    f"{tensor.layout}, want a plain, strided tensor"
                )

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Remove the gradients for the time of the block, and restore them.

        Backwards of Functions, which a capture runs to learn what they give, may add to them. One
        of another shape than its tensor, whose data was replaced, could not be put back.
        """
        leaves = [tensor for tensor in self.tensors if tensor.is_leaf and _has_own_gradient(tensor)]
        before = [tensor.grad for tensor in leaves]
        for tensor in leaves:
            tensor.grad = None
        try:
            yield
        finally:
            for tensor, gradient in zip(leaves, before, strict=True):
                tensor.grad = gradient

    def call_with(self, tensors: Sequence[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Run `call` with other tensors in all these attributes; assignments of its own persist."""
        before = [container[key] for container, key, _ in self.places]
        for container, key, position in self.places:
            container[key] = tensors[position]
        try:
            return call()
        finally:
            for (container, key, position), tensor in zip(self.places, before, strict=True):
                if container[key] is tensors[position]:
                    container[key] = tensor


def _has_own_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad is None or tensor.grad.shape == tensor.shape


def _keys(container: Any) -> list[Any]:
    if isinstance(container, list):
        return list(range(len(container)))
    in_lists = container.list_keys() if isinstance(container, _C.ScriptObject) else []
    return [*container, *in_lists]


def _key_name(key: Any) -> str:
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _containers(module: torch.nn.Module) -> list[tuple[dict | list, str]]:
    own = module.__dict__
    registries = (
        [script_object(module)] if is_script(module) else [own["_parameters"], own["_buffers"]]
    )
    found: list[tuple[dict | list, str]] = [(registry, "") for registry in (*registries, own)]
    # A set of tensors has no positions at which others could be put.
    found += [(value, name) for name, value in containers_in(own) if type(value) is not set]
    return found


class ModuleCapture:
    """A graph captured from a module, for calls like the one it was made from."""

    def __init__(
        self, trace: _Trace, guard: _C.CallGuard, run: Callable[..., Sequence[Any]],
        conditions: Sequence[str], written: dict[int, bool], lying: dict[int, str],
        unseen: Sequence[str], constant_numbers: Sequence[tuple[NumberPlace, int | float]],
    ) -> None:  # fmt: skip
        self.run = run
        # The numbers in attributes that are constants of the graph.
        self.constant_numbers = constant_numbers
        # What forward reads and no guard can compare.
        self.unseen = unseen
        self.is_recorded = isinstance(run, RecordedStep | RecordedRun)
        self._guard = guard
        self._num_integers = len(trace.integers)
        self._taken = trace.open_integers
        self._open_numbers = trace.open_numbers
        before = self._num_integers + len(trace.held.names)
        self._numbers = {name: before + i for name, i in trace.numbers.items()}
        self._asked = trace.asked
        first = len(trace.open_integers) + len(trace.held.names)
        # If results are made of arguments, they must be made of the caller's own, not of dense
        # copies.
        self._gives_arguments = self.is_recorded and any(i >= first for i in run.results.inputs)
        self._outputs = trace.outputs
        self._assigned = trace.assigned
        self._fields = trace.fields
        self._constants = trace.watch.constants
        self._assigns = bool(self._fields or self._assigned or self._constants)
        self._written = written
        self._lying = lying
        self._words = " and ".join(conditions)
        self._holds = _condition(trace.symbols, self._words) if conditions else None

    def match(self, args: tuple, kwargs: dict) -> list[Any] | None:
        """Give integers and sizes, the module's tensors and the call's; None if nothing fits."""
        kwargs = self._open_numbers.brought_by(kwargs)
        flat = self._guard.match(args, kwargs)
        if flat is None or (self._holds and not self._holds(*flat[: self._num_integers])):
            return None
        if self._asked and not self._asked.hold_for(self._values_of(flat)):
            return None
        if (self._written or self._lying) and self._refused(args, kwargs, flat):
            return None
        return flat

    def mismatch(self, args: tuple, kwargs: dict) -> str:
        """Say what keeps the graph from serving a call; empty if nothing does."""
        kwargs = self._open_numbers.brought_by(kwargs)
        why = self._guard.mismatch(args, kwargs)
        if why:
            return why
        flat = self._guard.match(args, kwargs)
        if self._holds and not self._holds(*flat[: self._num_integers]):
            return f"sizes: want {self._words}"
        if self._asked and not self._asked.hold_for(self._values_of(flat)):
            return f"numbers: want {self._asked}"
        return self._refused(args, kwargs, flat)

    def _values_of(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Give the numbers that a call brings, by name."""
        return {name: flat[i].item() for name, i in self._numbers.items()}

    def _refused(self, args: tuple, kwargs: dict, flat: Sequence[Any]) -> str:
        given = {id(leaf) for leaf in Structure((args, kwargs), "").leaves}
        for position, why in self._lying.items():
            if id(flat[position]) not in given:
                return why
        return refused_write(given, flat, self._written)

    def call(self, flat: list[Any], args: tuple, kwargs: dict) -> Any:
        """Run the graph with what `match` gave for a call; give the module's result."""
        if self._open_numbers.has_assigned:
            numbers = self._values_of(flat)
            result = self._call(flat, args, kwargs)
            self._open_numbers.assign(numbers)
            return result
        return self._call(flat, args, kwargs)

    def _call(self, flat: list[Any], args: tuple, kwargs: dict) -> Any:
        if len(self._taken) < self._num_integers:
            flat = [*(flat[i] for i in self._taken), *flat[self._num_integers :]]
        if not self._gives_arguments:
            return self._rebuild(self.run(*flat), args, kwargs)
        tensors = self._guard.tensors(args, self._open_numbers.brought_by(kwargs))
        given = [*flat[: len(flat) - len(tensors)], *tensors]
        return self._rebuild(self.run(*flat, given=given), args, kwargs)

    def integers_of(self, flat: list[Any]) -> list[int]:
        """Give the integers and sizes of a call from what `match` gave."""
        return flat[: self._num_integers]

    def refuse_empty(self) -> None:
        """Serve no call with a size of 0 from now on."""
        holds = self._holds or (lambda *integers: True)
        self._words = " and ".join(filter(None, [self._words, "no size of 0"]))
        self._holds = lambda *integers: 0 not in integers and holds(*integers)

    def _rebuild(self, results: Sequence[Any], args: tuple, kwargs: dict) -> Any:
        """Give a call's result from those of the graph, and do the assignments of forward."""
        if self._assigns:
            self._assign(results, args, kwargs)
        return self._outputs.rebuild(results)

    def _assign(self, results: Sequence[Any], args: tuple, kwargs: dict) -> None:
        count = len(results) - self._fields.num_tensors
        self._fields.assign(args, kwargs, results[count:])
        tensors = results[count - len(self._assigned) : count]
        for (entries, name), tensor in zip(self._assigned, tensors, strict=True):
            entries[name] = tensor
        for entries, name, value in self._constants:
            entries[name] = value


def refused_write(given: set[int], flat: Sequence[Any], written: dict[int, bool]) -> str:
    """Say what makes writing into arguments impossible; empty if nothing does.

    A graph was captured with tensors that share no memory, and writes into what it takes, which
    is a copy where a tensor is not dense. `given` are the ids of the call's own tensors, `written`
    tells by position whether autograd watches.
    """
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    for position, is_watched in written.items():
        tensor = flat[position]
        if is_watched and tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            return "forward writes into a leaf Variable that requires grad"
        if id(tensor) not in given:
            return "forward writes into an argument that is not dense"
        storage = tensor.untyped_storage().data_ptr()
        if storage and storages.count(storage) > 1:
            return "forward writes into an argument that shares its memory with another tensor"
    return ""


def capture_module(
    module: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    options: Options,
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
    given = RecordedInputs(are_fixed)
    capture = record_or_hand_over(
        lambda: _trace(call, options, state, given, recorded_reads), state
    )
    if capture is not None:
        return capture
    if places:  # a tensor in place of an attribute would take other branches than a number
        raise NoCapture("numbers of attributes are constants where the recorder cannot capture")
    try:
        return _trace(call, options, state, FakeInputs(are_fixed), recorded_reads)
    except Exception as error:
        # Dynamo cannot see through the recorder of reads.
        if not is_refused_by_dynamo(error):
            raise
    return _trace(call, options, state, FakeInputs(are_fixed), all_reads)


class _Call(NamedTuple):
    """What is captured: a call of a module, by `run`."""

    module: torch.nn.Module
    run: Callable[..., Any]
    args: tuple
    kwargs: dict
    numbers: frozenset[str]
    places: Sequence[NumberPlace]
    functions: Policy


def _trace(
    call: _Call, options: Options, state: GraphState, fakes: FakeInputs | RecordedInputs,
    reading: Callable[..., Any],
) -> ModuleCapture:  # fmt: skip
    module = call.module
    held = ModuleState(module)
    held.check()
    numbers = OpenNumbers(call.places)
    inputs = describe_call(
        module, call.args, numbers.brought_by(call.kwargs), held, call.numbers | numbers.names,
        is_recorded=isinstance(fakes, RecordedInputs),
    )  # fmt: skip
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
        trace = _Trace(call.run, held, inputs, fakes, watch, replay, numbers, reads)
        plain = _PlainCall(trace)
        first = len(trace.open_integers)
        parameters = frozenset(range(first, first + len(held.tensors)))
        capture = Capture(options, state, parameters)
        if isinstance(fakes, RecordedInputs):
            try:
                run = capture.record(
                    trace, trace.flat, trace.sources, plain, lambda: not watch.has_assigned(),
                    fakes.new_size,
                )  # fmt: skip
            except NestedTensor as error:
                raise NoCapture(
                    "forward makes nested tensors, whose row lengths are data; pad the rows to one "
                    "length, or use torch.compile"
                ) from error
            if not capture.recording.is_like_first:
                watch.raise_for_first_call()
            written = dict.fromkeys(capture.recording.written, False)
            _check_readers(capture.recording, held, first, written_outside)
        else:
            run = _traced_by_pytorch(capture, trace)
            watch.refuse_first_call(reads)
            written = fakes.written()
            capture.note_given_back(fakes.given_back())
    for program in state.programs:
        for constant in program.constants.values():
            if constant.requires_grad:
                raise Unsupported(
                    "forward reads a tensor that requires grad and is no parameter, buffer or "
                    "attribute of the module, so its gradient would be lost; make it one of these, "
                    "or pass it as an argument"
                )
    # Dynamo has traced the bodies of the operators, and reads there were not recorded.
    if capture.has_higher_order:
        reads.add_all()
    rows = [row for row in reads.rows() + replay.rows() if not numbers.is_open(row[0], row[1])]
    guard = _C.CallGuard(inputs.description[3], held.places, rows)
    for i in written.keys() & parameters:
        tensor = held.tensors[i - first]
        if written[i] and tensor.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"forward writes into '{held.names[i - first]}', which requires grad")
    offset = len(trace.integers) - first
    written = {i + offset: watched for i, watched in written.items() if i not in parameters}
    lying = {i + offset: why for i, why in capture.lying.items() if i not in parameters}
    trace.forget()
    plain.settle(trace, guard)
    conditions = trace.conditions(fakes)
    return ModuleCapture(
        trace, guard, run, conditions, written, lying, reads.unseen, _numbers_in(rows)
    )


def _check_readers(
    recording: Recording, held: ModuleState, first: int, written: Sequence[torch.Tensor]
) -> None:
    """Raise NoCapture if a graph reads what a module that stays in eager PyTorch writes into.

    The graph would not know whether it comes before or after.
    """
    inputs = recording.module.graph.find_nodes(op="placeholder")
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


def _traced_by_pytorch(capture: Capture, trace: _Trace) -> Callable[..., Sequence[Any]]:
    try:
        return capture.compile(trace, trace.flat, trace.sources)
    except Exception as error:
        if not passes_through(error):
            raise
        words = "AOTAutograd: asks Dynamo to trace again, which a module's capture does without"
        raise Unsupported(f"{words}: {type(error).__name__}") from error


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
        is_around = part is module and is_inside
        if not is_around and (part._backward_hooks or part._backward_pre_hooks):
            raise Unsupported(f"{name} has backward hooks, which a captured graph would not call")
    hook = hook_with_effects(module, of_parts_alone=is_inside)
    if hook is not None:
        # The parts of a module can be captured without these hooks, which fully_shard runs around
        # them.
        with blamed_on_forward() if hook.is_of_shards else nullcontext():
            raise Unsupported(f"{hook.words}, {HOOKS_RUN}")


def describe_call(
    module: torch.nn.Module, args: tuple, kwargs: dict, held: ModuleState,
    numbers: frozenset[str] = frozenset(), is_recorded: bool = True,
) -> Structure:  # fmt: skip
    """Take a call's arguments apart, under the names that forward gives them.

    `numbers` names those that may differ from call to call.
    """
    labels = {f"[1][{key!r}]": key for key in kwargs}
    parameters = list(signature_of(module).parameters.values())
    for i, parameter in enumerate(parameters):
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.KEYWORD_ONLY,
            parameter.VAR_KEYWORD,
        ):
            break
        labels[f"[0][{i}]"] = parameter.name
    dtype = torch.float64
    if not is_recorded:  # tensors stand for floats in a trace, and integers are symbols
        numbers = frozenset(name for name in numbers if type(kwargs.get(name)) is not int)
        if all(tensor.dtype != torch.float64 for tensor in held.tensors):
            dtype = torch.get_default_dtype()
    call = Structure((args, kwargs), "", numbers=numbers, float_dtype=dtype, labels=labels)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        of_args, (_, *rest) = call.description[3]  # the order of keyword arguments does not matter
        call.description = (*call.description[:3], (of_args, ("named", *rest)))
    return call


class _Trace(torch.nn.Module):
    """The module as a function of integers, its own tensors and the call's tensors."""

    def __init__(
        self, run: Callable[..., Any], held: ModuleState, inputs: Structure,
        fakes: FakeInputs | RecordedInputs, watch: Watch, replay: Replay, numbers: OpenNumbers,
        reads: Reads,
    ) -> None:  # fmt: skip
        super().__init__()
        # It is not set as a sub-module, because AOTAutograd would take its tensors as inputs.
        self.__dict__["run"] = run
        self.open_numbers = numbers
        self._reads = reads
        self.numbers: dict[str, int] = {}  # by name: the position among the tensors
        self.asked = Conditions()  # on numbers
        self.is_recorded = isinstance(fakes, RecordedInputs)
        self.held = held
        self.inputs = inputs
        self.watch = watch
        self.__dict__["replay"] = replay
        self.integers: list[int | torch.SymInt] = []
        self.outputs: Structure
        self.assigned: list[tuple[dict, str]] = []  # attributes to which forward assigns tensors
        self.fields = AssignedFields()
        self.leaves: list[tuple[bool, int]] = []  # whether a tensor, and which one
        tensors = []
        storages = {tensor.untyped_storage()._cdata for tensor in held.tensors}
        for i, (leaf, name) in enumerate(zip(inputs.leaves, inputs.names, strict=True)):
            if i in inputs.numbers:
                leaf = torch.tensor(leaf, dtype=inputs.numbers[i])
                self.numbers[name] = len(tensors)
            if isinstance(leaf, int):
                self.leaves.append((False, len(self.integers)))
                self.integers.append(fakes.integer(leaf, name))
                continue
            tensor = leaf
            # A later call may pass different tensors where this one passes the same tensor twice.
            # Tensors that are not dense are copied.
            storage = tensor.untyped_storage()._cdata
            if storage in storages or not is_dense(tensor):
                tensor = _stand_in(tensor)
            storages.add(storage)
            self.leaves.append((True, len(tensors)))
            tensors.append(fakes.tensor(tensor, name))
            self.integers += tensors[-1].shape
        # The names are read now. A symbol that is found equal to another one later has the other's
        # name.
        names = [symbol_name(n) if isinstance(n, torch.SymInt) else None for n in self.integers]
        self.open_integers = [i for i, name in enumerate(names) if name is not None]
        self.symbols = [name or f"n{i}" for i, name in enumerate(names)]
        state = [fakes.held(tensor, f"state_{i}") for i, tensor in enumerate(held.tensors)]
        self.flat = [*(self.integers[i] for i in self.open_integers), *state, *tensors]

    def forward(self, *flat: Any) -> list[Any]:
        """Run the module; its result is taken apart."""
        first = len(self.open_integers)
        integers = list(self.integers)
        for i, value in zip(self.open_integers, flat, strict=False):
            integers[i] = value
        held = flat[first : first + len(self.held.tensors)]
        tensors = flat[first + len(held) :]
        leaves = [tensors[i] if is_tensor else integers[i] for is_tensor, i in self.leaves]
        if self.is_recorded:
            self.asked = Conditions()
            for i in self.inputs.numbers:
                name, value = self.inputs.names[i], self.inputs.leaves[i]
                leaves[i] = number_for(value, name, leaves[i], self.asked)
        args, kwargs = self.inputs.rebuild(leaves)
        for taken in self.inputs.objects:
            self._reads.see_argument(taken.made, taken.name)
        with watched_seeding() as seeding, nullcontext() if self.is_recorded else DrawsNoted():
            result = self.held.call_with(held, lambda: self._call_module(args, kwargs))
        if seeding.is_found:
            raise NoCapture(
                "forward seeds PyTorch's random generator, or puts its state back "
                "(torch.manual_seed, fork_rng), which a captured graph would do at capture alone"
            )
        self.replay.check_containers()
        fields = self.fields.record(self.inputs.objects)
        for each in self.inputs.objects:
            each.compare_only(self._reads.read_of_argument(each.made))
        self._reads.check_numbers()
        taken = self.watch.take_tensors()
        self.assigned = [(entries, name) for entries, name, _ in taken]
        self.watch.note_run()
        self.outputs = Structure(result, "output", keeps_others=True, number_tensor=number_tensor)
        return [*self.outputs.leaves, *(tensor for _, _, tensor in taken), *fields]

    @enters_program
    def _call_module(self, args: tuple, kwargs: dict) -> Any:
        return self.open_numbers.record(self.run, args, kwargs)

    def conditions(self, fakes: FakeInputs | RecordedInputs) -> list[str]:
        """Give the conditions on `symbols` under which the trace is that of a call."""
        fixed = [
            f"{symbol} == {size}"
            for symbol, size in zip(self.symbols, self.integers, strict=True)
            if not isinstance(size, torch.SymInt)
        ]
        return [*fixed, *fakes.guards()]

    def forget(self) -> None:
        """Let go of the call's tensors and of those of the trace: the graph lives on with this."""
        self.outputs.leaves = []
        self.inputs.leaves = []
        for taken in self.inputs.objects:
            taken.forget()
        self.held.tensors = []
        self.flat = []
        self.replay.forget()

    def sources(self) -> list[onnx_files.Source | None]:
        """Name the flat inputs for files."""
        given = [
            onnx_files.Source(name)
            for name, (is_tensor, _) in zip(self.inputs.names, self.leaves, strict=True)
            if is_tensor
        ]
        held = [
            onnx_files.Source(name, tensor)
            for name, tensor in zip(self.held.names, self.held.tensors, strict=True)
        ]
        return [*[None] * len(self.open_integers), *held, *given]


class _PlainCall:
    """Calls the captured module as it is, with a graph's flat inputs."""

    def __init__(self, trace: _Trace) -> None:
        self._run = functools.partial(trace.open_numbers.call, trace.run)
        self._held = trace.held
        self._inputs = trace.inputs
        self._fields = trace.fields
        self._leaves = trace.leaves
        self._numbers = [*trace.inputs.numbers]

    def settle(self, trace: _Trace, guard: _C.CallGuard) -> None:
        """Take note of how the capture has ended."""
        self._guard = guard
        self._open = trace.open_integers
        is_open = set(self._open)
        self._integers = [None if i in is_open else n for i, n in enumerate(trace.integers)]
        # The attributes to which forward assigns tensors, with their previous values. Tensors are
        # inputs.
        self._assigned = trace.assigned
        self._before = _entries(trace.assigned)

    def __call__(self, *flat: Any) -> list[Any]:
        """Give the results; what forward assigns is put back.

        Raises Unsupported where the module is not what it was when it was captured.
        """
        first, count = len(self._open), len(self._held.names)
        integers = list(self._integers)
        for i, value in zip(self._open, flat, strict=False):
            integers[i] = value
        held, tensors = flat[first : first + count], flat[first + count :]
        leaves = [tensors[i] if is_tensor else integers[i] for is_tensor, i in self._leaves]
        for i in self._numbers:
            leaves[i] = leaves[i].item()
        args, kwargs = self._inputs.rebuild(leaves)
        with hanging_others:
            now = _entries(self._assigned)
            _put_entries(self._assigned, self._before)
            try:
                why = self._guard.mismatch(args, kwargs)
                if why:
                    raise Unsupported(f"the module was changed after its call: {why}")
                result = self._held.call_with(held, lambda: self._run(args, kwargs))
                assigned = _entries(self._assigned)
            finally:
                _put_entries(self._assigned, now)
        fields = self._fields.made(self._inputs.objects)
        return [*Structure(result, "output", keeps_others=True).leaves, *assigned, *fields]


def _entries(places: Sequence[tuple[dict | _C.ScriptObject, str]]) -> list[Any]:
    # The attributes of a script object have no get().
    return [entries[name] if name in entries else _MISSING for entries, name in places]  # noqa: SIM401


def _put_entries(
    places: Sequence[tuple[dict | _C.ScriptObject, str]], values: Sequence[Any]
) -> None:  # fmt: skip
    for (entries, name), value in zip(places, values, strict=True):
        if value is not _MISSING:
            entries[name] = value
        elif name in entries:
            del entries[name]


_MISSING = object()


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    order = _C.memory_order(tensor) or range(tensor.dim())
    sizes, options = tensor.shape, {"dtype": tensor.dtype, "device": tensor.device}
    new = torch.empty_permuted(sizes, tuple(order), **options)
    return new.requires_grad_(tensor.requires_grad)


def _condition(symbols: Sequence[str], words: str) -> Callable[..., bool]:
    """Compile a condition on integers, which stand under the names of their symbols."""
    holds = eval(f"lambda {', '.join(symbols)}: {words}", {"math": math, "torch": torch})

    def holds_or_raises(*integers: int) -> bool:
        try:
            return holds(*integers)
        # A condition on 1 / n is undefined for n = 0.
        except (ArithmeticError, ValueError):
            return False

    return holds_or_raises
