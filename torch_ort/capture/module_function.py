"""A call of a module as a function of integers and tensors, which can be captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.capture.assigned_fields import AssignedFields
from torch_ort.capture.module_state import ModuleState, replacing_tensors
from torch_ort.capture.open_numbers import OpenNumbers
from torch_ort.core.refusals import NoCapture
from torch_ort.engine import onnx_files
from torch_ort.guards.scripts import signature_of
from torch_ort.guards.structure import Structure, is_dense
from torch_ort.guards.watch import Reads, Watch
from torch_ort.pytorch.generators import DrawsNoted, watched_seeding
from torch_ort.pytorch.trace_compat import FakeInputs
from torch_ort.record.reasons import enters_program
from torch_ort.record.recorder import RecordedInputs
from torch_ort.rules.numbers import (
    Conditions,
    conditions_of_recording,
    number_for,
    number_tensor,
)
from torch_ort.rules.symbols import symbol_name
from torch_ort.script.replay import Replay
from torch_ort.script.unbacked import UnbackedNumber


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


class ModuleFunction(torch.nn.Module):
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
        self.sizes: dict[tuple[str, int], int] = {}  # positions among these, by tensor and dim
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
                tensor = _dense_like(tensor)
            storages.add(storage)
            self.leaves.append((True, len(tensors)))
            tensors.append(fakes.tensor(tensor, name))
            first = len(self.integers)
            self.sizes |= {(name, dim): first + dim for dim in range(tensor.dim())}
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
            self.asked = conditions_of_recording()
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
        self.outputs = Structure(result, "output", keeps_others=True, number_tensor=_given_number)
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


class PlainCall:
    """Calls the captured module as it is, with a graph's flat inputs."""

    def __init__(self, function: ModuleFunction) -> None:
        self._run = functools.partial(function.open_numbers.call, function.run)
        self._held = function.held
        self._inputs = function.inputs
        self._fields = function.fields
        self._leaves = function.leaves
        self._numbers = [*function.inputs.numbers]

    def settle(self, function: ModuleFunction, guard: _C.CallGuard) -> None:
        """Take note of how the capture has ended."""
        self._guard = guard
        self._open = function.open_integers
        is_open = set(self._open)
        self._integers = [None if i in is_open else n for i, n in enumerate(function.integers)]
        # The attributes to which forward assigns tensors, with their previous values. Tensors are
        # inputs.
        self._assigned = function.assigned
        self._before = _entries(function.assigned)

    def __call__(self, *flat: Any) -> list[Any]:
        """Give the results; what forward assigns is put back.

        Raises Unsupported where the module is not what it was when it was captured.
        """
        with replacing_tensors:
            why = self.change_since(*flat)
            if why:
                raise Unsupported(why)
            return self.unchecked(*flat)

    def unchecked(self, *flat: Any) -> list[Any]:
        """Give the results as a call does, of a module that has been checked."""
        held, args, kwargs = self._arguments(flat)
        with self._as_before():
            result = self._held.call_with(held, lambda: self._run(args, kwargs))
            assigned = _entries(self._assigned)
        fields = self._fields.made(self._inputs.objects)
        return [*Structure(result, "output", keeps_others=True).leaves, *assigned, *fields]

    def change_since(self, *flat: Any) -> str:
        """Say how the module differs from what was captured; empty if it does not."""
        held, args, kwargs = self._arguments(flat)
        # A part may have been frozen since.
        with self._as_before(), self._held.asking_like(held):
            why = self._guard.mismatch(args, kwargs)
        return f"the module was changed after its call: {why}" if why else ""

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Let the module have in the block what it had before it was captured."""
        with replacing_tensors:
            now = _entries(self._assigned)
            _put_entries(self._assigned, self._before)
            try:
                yield
            finally:
                _put_entries(self._assigned, now)

    def _arguments(self, flat: Sequence[Any]) -> tuple[Sequence[torch.Tensor], tuple, dict]:
        """Give the module's tensors and the call's arguments."""
        first, count = len(self._open), len(self._held.names)
        integers = list(self._integers)
        for i, value in zip(self._open, flat, strict=False):
            integers[i] = value
        held, tensors = flat[first : first + count], flat[first + count :]
        leaves = [tensors[i] if is_tensor else integers[i] for is_tensor, i in self._leaves]
        for i in self._numbers:
            leaves[i] = leaves[i].item()
        return (held, *self._inputs.rebuild(leaves))


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


def _given_number(value: Any) -> torch.Tensor | None:
    """Give the tensor that stands for a number in a graph; None for other values."""
    return value.tensor() if isinstance(value, UnbackedNumber) else number_tensor(value)


def _dense_like(tensor: torch.Tensor) -> torch.Tensor:
    order = _C.memory_order(tensor) or range(tensor.dim())
    sizes, options = tensor.shape, {"dtype": tensor.dtype, "device": tensor.device}
    new = torch.empty_permuted(sizes, tuple(order), **options)
    return new.requires_grad_(tensor.requires_grad)
