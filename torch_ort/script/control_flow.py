"""Branches and loops of a script with data-dependent conditions, as bodies of If and Loop.

Each way is replayed into a body. What differs from way to way, or from round to round, becomes a
tensor that the node gives: tensors, and numbers as tensors without dims.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from torch_ort import _C
from torch_ort.core.refusals import NoCapture
from torch_ort.pytorch.dispatch_compat import is_functionalized, unwrapped
from torch_ort.record.bodies import Body, recording, run_if, run_loop
from torch_ort.rules.answers import form_of
from torch_ort.rules.forms import Spec, same, value
from torch_ort.script.builtins import UNINITIALIZED, Number
from torch_ort.script.program import Block, Step
from torch_ort.script.unbacked import UnbackedNumber, number_tensor

_MOST_ROUNDS = 2**63 - 1  # of a loop that does not count its rounds

# What a body cannot do, because it happens outside of the graph, or not in each run.
REFUSED = {
    "prim::RaiseException": "it raises an error",
    "prim::SetAttr": "it assigns an attribute",
    "prim::PythonOp": "it calls Python",
    "prim::Print": "it prints",
    "aten::warn": "it warns",
}


class Replay(Protocol):
    """What runs the script (replay.py), as far as branches and loops need it."""

    frames: list[dict[int, Any]]
    num_unbacked_sizes: int
    created: set[_C.ScriptObject]

    def run_inside(self, block: Block, args: Sequence[Any], around: dict[int, Any]) -> list[Any]:
        """Run a body; its results alone say what it sets."""

    def unbacked_size(self, value: int) -> torch.SymInt:
        """Give a symbol for a data-dependent size."""

    def is_known(self, size: int | torch.SymInt, mark: int) -> bool:
        """Tell whether a size depends on none but the first `mark` data-dependent sizes."""


def record_if(
    replay: Replay, step: Step, condition: UnbackedNumber, values: dict[int, Any]
) -> Sequence[Any]:
    """Replay both ways; give the results of the If."""
    with _refusals(step, "a branch"):
        recorder, outside, mark = recording(), _Outside(replay), replay.num_unbacked_sizes
        ways = []
        for block in step.blocks:
            body = recorder.body()
            with recorder.writing_to(body):
                ways.append((body, replay.run_inside(block, [], values)))
                outside.check()
        (then_branch, a), (else_branch, b) = ways
        rows = _Rows(keeps_numbers=True)
        parts = [rows.add(x, y) for x, y in zip(a, b, strict=True)]
        firsts = [_tensor_in(then_branch, x) for x, _ in rows.values]
        seconds = [_tensor_in(else_branch, y) for _, y in rows.values]
        _fill_in(then_branch, firsts, seconds, replay, mark)
        _fill_in(else_branch, seconds, firsts, replay, mark)
        specs = [
            _common(replay, form_of(x), form_of(y), mark)
            for x, y in zip(firsts, seconds, strict=True)
        ]
        for body, tensors in ((then_branch, firsts), (else_branch, seconds)):
            with recorder.writing_to(body):
                recorder.set_outputs(tensors)
        made = recorder.call(
            run_if, [condition.to(torch.bool).tensor()],
            {"then_branch": then_branch, "else_branch": else_branch}, specs, _origin(step),
        )  # fmt: skip
        return [part.of(made) for part in parts]


def record_loop(
    replay: Replay, step: Step, inputs: Sequence[Any], values: dict[int, Any], first: int
) -> Sequence[Any]:
    """Replay one round of a loop; give the values that the Loop carries in the end.

    `inputs` are rounds, condition and what is carried, after `first` rounds that stand unrolled.
    """
    count, condition, *carried = inputs
    may_end = isinstance(condition, UnbackedNumber)
    if not may_end and not condition:
        return carried
    with _refusals(step, "a loop"):
        outside, widened = _Outside(replay), set()
        while True:
            round_ = _Round(replay, step, carried, values, first, widened)
            outside.check()
            if round_.is_like_the_next():
                break
        is_counted = not (isinstance(count, int) and count == _MOST_ROUNDS)
        rounds = number_tensor(count - first if first else count) if is_counted else None
        return round_.record(rounds, condition.tensor() if may_end else None)


class _Round:
    """One round of a loop, replayed into a body.

    `carried` gets what names hold that only a round sets; `widened`, the dims that a round changes.
    """

    def __init__(
        self, replay: Replay, step: Step, carried: list[Any], values: dict[int, Any], first: int,
        widened: set[tuple[int, int]],
    ) -> None:  # fmt: skip
        self._replay = replay
        self._step = step
        self._carried = carried
        self._widened = widened
        self._mark = replay.num_unbacked_sizes
        self._recorder = recorder = recording()
        rows = _Rows(keeps_numbers=False)
        self._parts = [rows.add(value) for value in carried]
        self._given = [_tensor(value) for (value,) in rows.values]
        self._body = recorder.body()
        with recorder.writing_to(self._body):
            index = UnbackedNumber(recorder.add_input(_number_spec(torch.int64)))
            recorder.add_input(_number_spec(torch.bool))  # the condition, which is true
            inputs = [self._add_input(i, form_of(x)) for i, x in enumerate(self._given)]
            given = [part.of(inputs) for part in self._parts]
            counted = index + first if first else index
            self._condition, *self._results = replay.run_inside(
                step.blocks[0], [counted, *given], values
            )

    def _add_input(self, index: int, spec: Spec) -> torch.Tensor:
        sizes = [
            self._replay.unbacked_size(value(size)) if (index, dim) in self._widened else size
            for dim, size in enumerate(spec.sizes)
        ]
        return self._recorder.add_input(_row_major(spec, sizes))

    def is_like_the_next(self) -> bool:
        """Tell whether the round gives values like those that it is given; if so, finish it."""
        if self._learns_initial_values():
            return False
        rows = _Rows(keeps_numbers=False)
        for before, after in zip(self._carried, self._results, strict=True):
            rows.add(before, after)
        self._made = [_tensor_in(self._body, after) for _, after in rows.values]
        num_widened = len(self._widened)
        for i, (given, made) in enumerate(zip(self._given, self._made, strict=True)):
            self._compare(i, form_of(given), form_of(made))
        if len(self._widened) > num_widened:
            return False
        with self._recorder.writing_to(self._body):
            self._recorder.set_outputs([_tensor(self._condition).to(torch.bool), *self._made])
        return True

    def _learns_initial_values(self) -> bool:
        """Initialise names that are unset before the loop; nothing reads their first value."""
        learns = False
        for i, (before, after) in enumerate(zip(self._carried, self._results, strict=True)):
            if before is UNINITIALIZED and after is not UNINITIALIZED:
                rows = _Rows(keeps_numbers=False)
                part = rows.add(after)
                tensors = [_tensor_in(self._body, value) for (value,) in rows.values]
                zeros = [_zeros(form_of(x), self._replay, self._mark) for x in tensors]
                self._carried[i] = part.of(zeros)
                learns = True
        return learns

    def _compare(self, index: int, given: Spec, made: Spec) -> None:
        _check_alike(given, made)
        for dim, (a, b) in enumerate(zip(given.sizes, made.sizes, strict=True)):
            if not same(a, b):
                self._widened.add((index, dim))

    def record(self, rounds: torch.Tensor | None, condition: torch.Tensor | None) -> Sequence[Any]:
        """Record the Loop; give the values that it carries in the end."""
        specs = [
            _common(self._replay, form_of(given), form_of(made), self._mark)
            for given, made in zip(self._given, self._made, strict=True)
        ]
        made = self._recorder.call(
            run_loop, [rounds, condition, *self._given], {"body": self._body}, specs,
            _origin(self._step),
        )  # fmt: skip
        return [part.of(made) for part in self._parts]


# ---- values of several branches, side by side


class _Same(NamedTuple):
    """A value that is the same on every way."""

    value: Any

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.value


class _Item(NamedTuple):
    """A tensor, or the number in it."""

    index: int
    is_number: bool

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        tensor = tensors[self.index]
        return UnbackedNumber(tensor) if self.is_number else tensor


class _Sequence(NamedTuple):
    """A list or a tuple of such values."""

    make: Callable[[list[Any]], Any]
    parts: list[Any]

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.make([part.of(tensors) for part in self.parts])


class _Rows:
    """Tensors and numbers in the values of several ways: one row of `values` for each.

    Numbers that are equal on every way may be kept as they are.
    """

    def __init__(self, keeps_numbers: bool) -> None:
        self.values: list[tuple[Any, ...]] = []
        self._keeps_numbers = keeps_numbers

    def add(self, *ways: Any) -> Any:
        """Add the values of one name; give what makes its value of those of the rows."""
        given = [value for value in ways if value is not UNINITIALIZED]
        first = given[0] if given else UNINITIALIZED
        if given and all(isinstance(value, torch.Tensor) for value in given):
            return self._add_row(ways, is_number=False)
        if given and all(map(_is_number, given)):
            if self._keeps_numbers and all(_is_same_number(first, value) for value in given):
                return _Same(first)
            return self._add_row(ways, is_number=True)
        if isinstance(first, list | tuple) and _are_alike(ways):
            make = getattr(type(first), "_make", type(first))
            return _Sequence(make, [self.add(*parts) for parts in zip(*ways, strict=True)])
        if all(value is first or _is_same_constant(value, first) for value in given):
            return _Same(first)
        raise _Refused(f"its branches give {' and '.join(map(_described, ways))}")

    def _add_row(self, ways: tuple[Any, ...], *, is_number: bool) -> _Item:
        self.values.append(ways)
        return _Item(len(self.values) - 1, is_number)


def _is_number(value: Any) -> bool:
    return isinstance(
        value, (UnbackedNumber, Number, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def _is_same_number(a: Any, b: Any) -> bool:
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return all(isinstance(x, int | torch.SymInt) for x in (a, b)) and same(a, b)
    return type(a) is type(b) and type(a) in (bool, int, float) and a == b


def _is_same_constant(a: Any, b: Any) -> bool:
    return type(a) is type(b) and type(a) in (str, torch.device) and a == b


def _are_alike(ways: Sequence[Any]) -> bool:
    return all(type(x) is type(ways[0]) and len(x) == len(ways[0]) for x in ways)


def _described(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return repr(value)
    return "None" if value is None else f"a {type(value).__name__}"


# ---- tensors of a branch, and their forms


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else number_tensor(value)


def _tensor_in(body: Body, value: Any) -> torch.Tensor | None:
    if value is UNINITIALIZED:
        return None
    with recording().writing_to(body):
        return _tensor(value)


def _fill_in(body: Body, tensors: list[Any], others: list[Any], replay: Replay, mark: int) -> None:
    """Give a branch a value for what only the other sets, in the same form; it is never read."""
    for i, other in enumerate(others):
        if tensors[i] is None:
            with recording().writing_to(body):
                tensors[i] = _zeros(form_of(other), replay, mark)


def _zeros(spec: Spec, replay: Replay, mark: int) -> torch.Tensor:
    if not all(replay.is_known(size, mark) for size in spec.sizes):
        raise _Refused("it sets a tensor of data-dependent size in one branch only")
    return torch.zeros(spec.sizes, dtype=spec.dtype, device=spec.device)


def _number_spec(dtype: torch.dtype) -> Spec:
    return Spec([], [], dtype, torch.device("cpu"))


def _row_major(spec: Spec, sizes: Sequence[Any]) -> Spec:
    return Spec(list(sizes), _C.contiguous_strides(list(sizes)), spec.dtype, spec.device)


def _check_alike(a: Spec, b: Spec) -> None:
    if (a.dtype, a.device, len(a.sizes)) != (b.dtype, b.device, len(b.sizes)):
        forms = [f"{str(x.dtype).removeprefix('torch.')} of {len(x.sizes)} dims" for x in (a, b)]
        raise _Refused(f"a tensor has different forms: {' and '.join(forms)}")


def _common(replay: Replay, a: Spec, b: Spec, mark: int) -> Spec:
    """Give a form that fits both tensors: sizes in which they differ are data-dependent."""
    _check_alike(a, b)
    sizes = [
        x if same(x, y) and replay.is_known(x, mark) else replay.unbacked_size(value(x))
        for x, y in zip(a.sizes, b.sizes, strict=True)
    ]
    if all(map(same, sizes, a.sizes)) and all(map(same, a.strides, b.strides)):
        return a
    return _row_major(a, sizes)


# ---- what a body must not change


class _Outside:
    """Tensors, lists and dicts around a body."""

    def __init__(self, replay: Replay) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._containers: dict[int, tuple[Any, list[Any]]] = {}
        for tensor in recording().inputs():
            self._add(tensor)
        for frame in replay.frames:
            for held in frame.values():
                self._add(held)
        for created in replay.created:
            for _, held in created.items():
                self._add(held)

    def _add(self, held: Any) -> None:
        if isinstance(held, UnbackedNumber):
            held = held.tensor()
        if isinstance(held, torch.Tensor):
            # If it was written to before, this must happen outside of the body.
            if is_functionalized(held) and id(held) not in self._tensors:
                self._tensors[id(held)] = held, unwrapped(held)
        elif isinstance(held, list | tuple | dict) and id(held) not in self._containers:
            self._containers[id(held)] = held, _items(held)
            for item in _items(held):
                self._add(item)

    def check(self) -> None:
        """Raise if one was changed."""
        for tensor, before in self._tensors.values():
            if unwrapped(tensor) is not before:
                raise _Refused("it writes into a tensor from outside of it")
        for container, before in self._containers.values():
            now = _items(container)
            if len(now) != len(before) or any(map(_is_other, now, before)):
                raise _Refused(f"it changes a {type(container).__name__} from outside of it")


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _is_other(a: Any, b: Any) -> bool:
    return a is not b


class _Refused(Exception):
    """Why a branch or a loop is no body."""


@contextmanager
def _refusals(step: Step, what: str) -> Iterator[None]:
    """Say what of the user's cannot be captured, and why."""
    recorder = recording()
    recorder.first_line = recorder.first_line or step.where()
    try:
        yield
    except NoCapture:
        raise
    except Exception as error:
        raise NoCapture(
            f"TorchScript: {what} on data cannot be captured: {error} ({step.where()})"
        ) from error


def _origin(step: Step) -> str:
    return f"{os.path.basename(step.file)}:{step.line}" if step.file else ""
