"""TorchScript under a trace: a scripted function is read in C++ and replayed call by call.

TorchScript's own interpreter looks through nothing that a trace in Python stands on: symbols for
sizes, tensors without data. While a module is captured, each call of a scripted function or
method runs here instead: operators are called one by one, everything else is done on plain values,
and a condition that is no constant becomes a guard by being asked for its truth.

Scripts are neither inlined nor converted: each function becomes a program once, and modules of one
type share it. Attributes are read from the live objects, in which a capture puts its own tensors.
"""

from __future__ import annotations

import functools
import types
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.guards.scripts import guard_row, holds_tensor, is_script, script_object
from torch_ort.pytorch import patches
from torch_ort.pytorch.graph_compat import schema
from torch_ort.pytorch.trace_compat import data_is_asked
from torch_ort.rules.symbols import symbol_name
from torch_ort.script.builtins import BUILTINS, TAKE_NUMBERS, Number, of_numbers, with_numbers
from torch_ort.script.control_flow import REFUSED, record_if, record_loop
from torch_ort.script.program import Block, Step, read_block
from torch_ort.script.unbacked import UnbackedNumber, like_number, selected

if TYPE_CHECKING:
    from torch_ort.pytorch.trace_compat import FakeInputs
    from torch_ort.record.recorder import RecordedInputs

__all__ = ["Replay", "replayed"]


class Replay:
    """Runs scripted functions under a trace, and remembers what they read besides tensors."""

    def __init__(
        self, owners: dict[_C.ScriptObject, str], inputs: FakeInputs | RecordedInputs
    ) -> None:
        self._owners = owners  # the script objects in the captured tree, by path
        self._inputs = inputs
        self.frames: list[dict[int, Any]] = []  # values of the functions that run, by number
        self.num_unbacked_sizes = 0  # number of symbols that were made for data-dependent sizes
        # How many of these symbols there were when each was made.
        self._unbacked_sizes: dict[str, int] = {}
        self._depth = 0  # of nested bodies of branches and loops on data
        # Attributes of these objects that are lists of tensors.
        self._followed = {(owner, name) for owner in owners for name, _ in owner.list_keys()}
        self.created: set[_C.ScriptObject] = set()
        self._read: set[tuple[_C.ScriptObject, str]] = set()
        # By key, which this keeps alive.
        self._programs: dict[int, tuple[_C.ScriptFunction, Block]] = {}
        # Lists and dicts in attributes are copies, one for each attribute and run.
        self._containers: dict[tuple[_C.ScriptObject, str], tuple[Any, Any]] = {}

    def call(self, callable_: Any, args: tuple, kwargs: dict) -> Any:
        """Run a call that comes from Python."""
        function = _C.ScriptFunction(callable_)
        with _grad_mode_kept():
            return _leave(self._run(function, function.bind(args, kwargs)))

    def forget(self) -> None:
        """Let go of the trace's values: what has been captured lives on with this."""
        self.created.clear()
        self._containers.clear()
        self._programs.clear()

    def add_all_reads(self, owner: _C.ScriptObject) -> None:
        """Count all attributes of an object and of those in it as read."""
        for name, value in owner.items():
            if isinstance(value, _C.ScriptObject):
                self.add_all_reads(value)
            if holds_tensor(value) and owner not in self._owners:
                raise Unsupported(
                    f"TorchScript: tensor {name!r} belongs to {owner.type_name()}, which is not "
                    "part of the captured module"
                )
            if not isinstance(value, torch.Tensor):
                self._read.add((owner, name))

    def rows(self) -> list[tuple[Any, Any, str, Any, str]]:
        """Give what `_C.CallGuard` compares: container, key, how, value, words."""
        return [
            guard_row(owner, name, f"attribute {name!r} of {self._called(owner)}")
            for owner, name in self._read
        ]

    def _called(self, owner: _C.ScriptObject) -> str:
        path = self._owners.get(owner)
        return owner.type_name() if path is None else f"module {path!r}" if path else "the module"

    def check_containers(self) -> None:
        """Raise Unsupported if a list or dict in an attribute was changed; forget them all."""
        changed = [
            f"{name!r} of {self._called(owner)}"
            for (owner, name), (value, before) in self._containers.items()
            if not _is_same(value, before)
        ]
        self._containers.clear()
        if changed:
            raise Unsupported(
                f"forward changes {', '.join(changed)}, which a captured graph cannot do"
            )

    def _run(self, function: _C.ScriptFunction, args: Sequence[Any]) -> Any:
        if function.key not in self._programs:
            self._programs[function.key] = (function, read_block(function.program()))
        _, body = self._programs[function.key]
        (result,) = self._run_frame(body, args, {})
        return result

    def run_inside(self, block: Block, args: Sequence[Any], around: dict[int, Any]) -> list[Any]:
        """Run a body of a data-dependent branch or loop; its results alone say what it sets."""
        self._depth += 1
        try:
            return self._run_frame(block, args, dict(around))
        finally:
            self._depth -= 1

    def unbacked_size(self, value: int) -> torch.SymInt:
        """Give a symbol for a data-dependent size; `value` is an example of what it may be."""
        self.num_unbacked_sizes += 1
        size = self._inputs.unbacked_size(value)
        self._unbacked_sizes[symbol_name(size)] = self.num_unbacked_sizes
        return size

    def is_known(self, size: int | torch.SymInt, mark: int) -> bool:
        """Tell whether a size depends on none but the first `mark` data-dependent sizes."""
        symbols = _C.symbols_in_size(size) or ()
        return all(self._unbacked_sizes.get(name, 0) <= mark for name in symbols)

    def _run_frame(self, block: Block, args: Sequence[Any], values: dict[int, Any]) -> list[Any]:
        self.frames.append(values)
        try:
            return self._run_block(block, args, values)
        finally:
            self.frames.pop()

    def _run_block(self, block: Block, args: Sequence[Any], values: dict[int, Any]) -> list[Any]:
        values.update(zip(block.inputs, args, strict=True))
        for step in block.steps:
            inputs = [values[number] for number in step.inputs]
            results = self._run_step(step, inputs, values)
            values.update(zip(step.outputs, results, strict=True))
        return [values[number] for number in block.outputs]

    def _run_step(self, step: Step, inputs: list[Any], values: dict[int, Any]) -> Sequence[Any]:
        if self._depth and step.kind in REFUSED:
            raise Unsupported(f"{REFUSED[step.kind]} ({step.where()})")
        run = _STEPS.get(step.kind)
        if run is not None:
            return run(self, step, inputs, values)
        if step.is_operator and step.kind not in _ON_VALUES:
            return _run_operator(step, inputs)
        builtin = BUILTINS.get(step.kind)
        if builtin is None:
            raise Unsupported(f"TorchScript: {step.kind} is not supported ({step.where()})")
        result = _asked(step, lambda: builtin(step.overload, *inputs))
        return _results(step, result)

    # ---- attributes

    def _get(self, owner: _C.ScriptObject, name: str, step: Step) -> Any:
        if (owner, name) in self._containers:
            return self._containers[owner, name][0]
        value = owner[name]
        if owner in self.created:
            return value
        if isinstance(value, torch.Tensor):
            self._check_owner(owner, name, step)
            return value
        self._read.add((owner, name))
        if isinstance(value, list | tuple | dict):
            # Tensors in a list are inputs of the graph, as single ones are.
            is_followed = (owner, name) in self._followed
            if holds_tensor(value) and not is_followed:
                raise Unsupported(
                    f"TorchScript: attribute {name!r} of {self._called(owner)} holds tensors in a "
                    f"{type(value).__name__}, which a captured graph cannot follow ({step.where()})"
                )
            self._containers[owner, name] = (value, owner[name])
        return value

    def _set(self, owner: _C.ScriptObject, name: str, value: Any, step: Step) -> None:
        if owner in self.created:
            owner[name] = value
        elif isinstance(value, torch.Tensor):
            self._check_owner(owner, name, step)
            owner[name] = value
        elif isinstance(before := owner[name], torch.Tensor) or not _is_same(before, value):
            raise Unsupported(
                f"forward assigns {name!r} of {self._called(owner)}, which a captured graph cannot "
                f"do ({step.where()})"
            )
        else:
            self._read.add((owner, name))

    def _check_owner(self, owner: _C.ScriptObject, name: str, step: Step) -> None:
        """Raise Unsupported unless the graph gets an object's tensors at every call."""
        if owner not in self._owners:
            raise Unsupported(
                f"TorchScript: tensor {name!r} belongs to {owner.type_name()}, which is not part "
                f"of the captured module ({step.where()})"
            )


@contextmanager
def _grad_mode_kept() -> Iterator[None]:
    """Put grad mode back after an error, which leaves no `with` of a script."""
    before = torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(before)
        raise


def _is_same(a: Any, b: Any) -> bool:
    """Compare values of attributes; tensors are the same ones or not."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_is_same, a.values(), b.values()))
    return a == b


def _results(step: Step, result: Any) -> Sequence[Any]:
    if len(step.outputs) == 1:
        return [result]
    return result if step.outputs else []


def _leave(value: Any) -> Any:
    """Give a result to Python."""
    if isinstance(value, Number):
        return value.tensor()
    if isinstance(value, _C.ScriptObject):
        raise Unsupported(
            f"TorchScript: an object of {value.type_name()} cannot be a result of a graph"
        )
    if isinstance(value, dict):
        return {key: _leave(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_leave(part) for part in value]
        return getattr(type(value), "_make", type(value))(parts)
    return value


def _asked(step: Step, ask: Callable[[], Any]) -> Any:
    """Give the value that a step asks for; if it is data-dependent, name the user's line."""
    try:
        return ask()
    except Exception as error:
        if data_is_asked(error):
            raise Unsupported(
                f"TorchScript: {step.kind} depends on the numbers in a tensor, which a captured "
                f"graph cannot follow ({step.where()})"
            ) from error
        raise


# ---- operators


# What torch.jit.trace records of a convolution: the operator below has no flags of cuDNN, which
# are those of the process that runs it.
_CONVOLUTION, _NUM_FLAGS = "aten::_convolution", 4


def _run_operator(step: Step, inputs: list[Any]) -> Sequence[Any]:
    kind = step.kind
    if kind == _CONVOLUTION:
        kind, inputs = "aten::convolution", inputs[:-_NUM_FLAGS]
    if any(isinstance(value, Number) for value in inputs):
        known = of_numbers(step.kind, inputs)
        if known is not None:
            return [known]
    if any(isinstance(value, UnbackedNumber) for value in inputs):
        if step.kind == "aten::select" and isinstance(inputs[0], torch.Tensor):
            return [selected(*inputs)]
        inputs = _with_unbacked(step, inputs)
    inputs = [_as_tensor(value) for value in with_numbers(step.kind, inputs)]
    operator = _operator(kind, step.overload)
    takes_both = step.overload == "Scalar" and step.kind in TAKE_NUMBERS
    if takes_both or (step.overload in _WITH_TENSORS and _is_number_tensor(operator, inputs)):
        operator = _operator(step.kind, _WITH_TENSORS[step.overload])
    named = _keyword_names(operator)
    split = len(inputs) - len(named)
    call = _at_line(operator, step)
    keywords = dict(zip(named, inputs[split:], strict=True))
    return _results(step, _asked(step, lambda: call(inputs[:split], keywords)))


def _with_unbacked(step: Step, inputs: list[Any]) -> list[Any]:
    """Give tensors for data-dependent numbers, where the operator has an overload for them."""
    operand = inputs[0]
    if step.overload not in _WITH_TENSORS or not isinstance(operand, torch.Tensor):
        return inputs
    return [
        like_number(value, operand) if isinstance(value, UnbackedNumber) else value
        for value in inputs
    ]


_WITH_TENSORS = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor"}


def _is_number_tensor(operator: Any, inputs: Sequence[Any]) -> bool:
    """Tell whether a tensor stands for a number: a float that each call provides as one."""
    arguments = schema(operator).arguments
    return any(
        isinstance(value, torch.Tensor) and argument.type.kind() == "NumberType"
        for value, argument in zip(inputs, arguments, strict=True)
    )


def _as_tensor(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_tensor(part) for part in value]
    return value.tensor() if isinstance(value, Number | UnbackedNumber) else value


@functools.lru_cache(maxsize=4096)
def _operator(kind: str, overload: str) -> Any:
    namespace, name = kind.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


@functools.lru_cache(maxsize=4096)
def _keyword_names(operator: Any) -> tuple[str, ...]:
    return tuple(a.name for a in schema(operator).arguments if a.kwarg_only)


def _at_line(call: Callable[..., Any], step: Step) -> Callable[..., Any]:
    """Give a caller whose frame is at the user's line, for tracebacks."""
    code = _CALLER.replace(co_filename=step.file or "<torchscript>", co_firstlineno=step.line or 1)
    return types.FunctionType(code, {"call": call})


_CALLER = compile("lambda args, kwargs: call(*args, **kwargs)", "", "eval").co_consts[0]


# ---- other nodes


def _run_constant(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    return [step.extra]


def _run_get(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    return [replay._get(inputs[0], step.name, step)]


def _run_set(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    replay._set(inputs[0], step.name, _as_tensor(inputs[1]), step)
    return []


def _run_call(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    function, *args = inputs
    return [_at_line(replay._run, step)((function, args), {})]


def _run_method(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    method = inputs[0].method(step.name)
    return [_at_line(replay._run, step)((method, inputs), {})]


def _run_enter(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    if "autocast" in inputs[0].type_name():  # TorchScript's compiler changes the code inside
        raise Unsupported(f"TorchScript: torch.autocast inside of a script ({step.where()})")
    return [replay._run(inputs[0].method("__enter__"), inputs)]


def _run_exit(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    return [replay._run(inputs[0].method("__exit__"), [inputs[0], None, None, None])]


def _run_if(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    if isinstance(inputs[0], UnbackedNumber):
        return record_if(replay, step, inputs[0], values)
    taken = step.blocks[0 if _asked(step, lambda: bool(inputs[0])) else 1]
    return replay._run_block(taken, [], values)


def _run_loop(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    count, condition, *carried = inputs
    (body,) = step.blocks
    if isinstance(count, UnbackedNumber):
        return record_loop(replay, step, inputs, values, 0)
    for i in range(_asked(step, lambda: int(count))):
        if isinstance(condition, UnbackedNumber):  # earlier rounds are unrolled
            return record_loop(replay, step, [count, condition, *carried], values, i)
        if not _asked(step, lambda condition=condition: bool(condition)):
            break
        condition, *carried = replay._run_block(body, [i, *carried], values)
    return carried


def _run_raise(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    message, name = inputs[0], inputs[1] if len(inputs) > 1 else None
    raise Unsupported(f"TorchScript raises {(name or 'RuntimeError')}: {message} ({step.where()})")


def _run_tuple(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    if step.extra is None:
        return [tuple(inputs)]
    return [_named_tuple(*step.extra)._make(inputs)]


@functools.lru_cache(maxsize=1024)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
    return namedtuple(name, fields)


def _run_list(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    return [inputs]


def _run_dict(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    return [dict(zip(inputs[::2], inputs[1::2], strict=True))]


def _run_unpack(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    if len(inputs[0]) != len(step.outputs):
        raise Unsupported(
            f"TorchScript: {len(inputs[0])} values for {len(step.outputs)} names ({step.where()})"
        )
    return inputs[0]


def _run_create(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    created = step.extra()
    replay.created.add(created)
    return [created]


def _run_container(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    container, key = inputs
    return [replay._get(container, key if isinstance(key, str) else str(int(key)), step)]


def _run_isinstance(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    return [step.extra(_as_tensor(inputs[0]))]


def _run_python(replay: Replay, step: Step, inputs: list, values: dict) -> Sequence[Any]:
    function, convention, scalars = step.extra
    given, fixed = iter(inputs), iter(scalars)
    args = [next(given) if kind == "d" else next(fixed) for kind in convention]
    for i, value in enumerate(args):
        if isinstance(value, _C.ScriptObject):  # Python may read any attribute of it
            replay.add_all_reads(value)
            args[i] = value.as_torch()
    result = function(*map(_as_tensor, args))
    return _results(step, result)


_STEPS: dict[str, Callable[[Replay, Step, list, dict], Sequence[Any]]] = {
    "prim::Constant": _run_constant,
    "prim::GetAttr": _run_get,
    "prim::SetAttr": _run_set,
    "prim::CallFunction": _run_call,
    "prim::CallMethod": _run_method,
    "prim::Enter": _run_enter,
    "prim::Exit": _run_exit,
    "prim::If": _run_if,
    "prim::Loop": _run_loop,
    "prim::RaiseException": _run_raise,
    "prim::TupleConstruct": _run_tuple,
    "prim::TupleUnpack": _run_unpack,
    "prim::ListConstruct": _run_list,
    "prim::ListUnpack": _run_unpack,
    "prim::DictConstruct": _run_dict,
    "prim::CreateObject": _run_create,
    "prim::ModuleContainerIndex": _run_container,
    "prim::isinstance": _run_isinstance,
    "prim::PythonOp": _run_python,
}
# Operators that return plain values, or take them. Symbols must stay symbols.
_ON_VALUES = frozenset(
    f"aten::{name}"
    for name in ("size", "stride", "storage_offset", "numel", "dim", "item", "is_contiguous")
)


@contextmanager
def replayed(module: torch.nn.Module, inputs: FakeInputs | RecordedInputs) -> Iterator[Replay]:
    """Let calls of scripted functions and methods in this thread run in a replay."""
    owners = {script_object(part): path for path, part in module.named_modules() if is_script(part)}
    replay = Replay(owners, inputs)

    def call(theirs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return replay.call(self, args, kwargs)

    with patches.SCRIPT_METHOD.by(call), patches.SCRIPT_FUNCTION.by(call):
        yield replay
