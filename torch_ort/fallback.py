"""Fallback to eager PyTorch: the one place that catches errors of capture and of the engine.

`within_boundary` surrounds each call of the user's that may fail in capture or in the engine, both
for torch.compile and for ORTModule. Such an error does not reach the user: the call runs in eager
PyTorch instead, and gives eager's result or raises eager's own error.

Some errors are raised instead: messages for Dynamo, errors of torch.autograd.Functions, errors of
what the user asked for (files, passes of their own), and a lost device (csrc/cuda/driver.h). Once a
graph has run, a kernel's own error is raised as eager PyTorch would raise it. Two kinds of later
errors still end in eager PyTorch: those before the first step (csrc/run/call_watch.h), and the
engine's own in a graph that neither writes nor draws random numbers.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torch_ort._C import DeviceError, Error, InternalError, Unsupported, UserError
from torch_ort.core import counting
from torch_ort.core.scopes import listening
from torch_ort.core.user_code import Line, blamed, calling_line, warn_at
from torch_ort.pytorch import autograd_compat, dynamo_compat
from torch_ort.pytorch.generators import TorchGenerators

FORWARD_MODE = "forward-mode AD: an input has a tangent, which a captured graph would lose"


class FallbackWarning(UserWarning):
    """A part of the program runs in eager PyTorch instead of the engine; the message says why.

    It names the stage that failed, the operator and the line of the user's program where they are
    known, and what to do to get an error instead.
    """


@dataclass(frozen=True)
class Fallback:
    """One graph, or one call, that ran in eager PyTorch because the engine could not run it."""

    stage: str  # the stage that failed, one of torch_ort.core.counting.STAGES
    reason: str  # with the operator and the user's line, if they are known
    line: Line  # of the user's program: the line that caused the failure, or else that of the call

    def __str__(self) -> str:
        return f"{self.line}: stage '{self.stage}': {self.reason}"


_watchers: list[list[Fallback]] = []


def watching() -> AbstractContextManager[list[Fallback]]:
    """Give a list to which each fallback in the block is added."""
    return listening(_watchers)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Note on an error in which stage it was raised; of nested stages the innermost counts."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "stage"):
            error.stage = name
        raise


@contextmanager
def asked_for() -> Iterator[None]:
    """Mark errors of what the user requested besides results: saved files, passes of their own.

    These errors are raised under every fallback policy: eager PyTorch cannot do what was requested.
    """
    try:
        yield
    except (UserError, OSError) as error:
        error.torch_ort_asked_for = True
        raise


@dataclass(frozen=True)
class Failure:
    """Why the engine cannot run a call: the error, and the stage that raised it."""

    error: Exception
    stage: str


# Called in place of a run that has failed; its result is that of the run.
Instead = Callable[[Failure], Any]


def within_boundary(
    engine: Callable[[], Any], instead: Instead, stage_name: str, state: Any = None
) -> Any:
    """Call `engine`; if it fails, undo its side effects and return `instead(failure)`.

    Undone are draws from PyTorch's random generators and writes into tensors of the caller, which
    the engine lists in `state.written` while it runs. `stage_name` is the stage of errors that name
    none. Raises errors that are not failures of the engine (see `failure_of`), and that by which a
    checkpoint ends its recomputation as soon as it has what it needs.
    """
    random = TorchGenerators()
    if state is not None:
        state.written = []
    try:
        return engine()
    except DeviceError:
        raise  # nothing can be restored on a device that is lost
    except Exception as error:
        if autograd_compat.ends_recomputation(error):
            raise
        random.restore()
        if state is not None:
            put_back(state.written)
        failure = failure_of(error, stage_name)
    finally:
        if state is not None:
            state.written = None
    return instead(failure)


class _Here(threading.local):
    runs_in_eager = 0


_here = _Here()


def counted_in_eager(run: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function that runs a graph in eager PyTorch, and counts that for this thread."""

    @functools.wraps(run)
    def counted(*args: Any) -> Any:
        _here.runs_in_eager += 1
        return run(*args)

    return counted


def runs_in_eager() -> int:
    """Tell how often this thread has run graphs in eager PyTorch instead of the engine."""
    return _here.runs_in_eager


def failure_of(error: Exception, stage_name: str) -> Failure:
    """Describe a failure of the engine.

    Raises the error again if it is a control-flow exception of Dynamo, or if it comes from a
    torch.autograd.Function of the user's, from something that the user requested (`asked_for`), or
    from a lost device: there eager PyTorch would fail too, with a message that does not say why.
    """
    is_message = (
        dynamo_compat.passes_through(error) and dynamo_compat.frame_in_capture() is not None
    )
    is_lost = isinstance(error, DeviceError)
    if is_message or is_lost or comes_from_function(error) or hasattr(error, "torch_ort_asked_for"):
        raise error
    if hasattr(error, "torch_ort_nothing_ran"):
        stage_name = "plan"
    return Failure(error, getattr(error, "stage", stage_name))


def failure_of_later_run(error: Exception, is_repeatable: bool) -> Failure:
    """Describe why a graph that has run before fails now, if eager PyTorch may run the call.

    It may in two cases: no step of the graph has run yet (the plan for new sizes has failed), or
    the error is the engine's own and the graph is repeatable, which means that it neither writes
    into tensors of the caller nor draws random numbers. Otherwise the error is raised again. So is
    an error of a kernel, since eager PyTorch would raise the same.
    """
    has_begun = not hasattr(error, "torch_ort_nothing_ran")
    if has_begun and not (is_repeatable and isinstance(error, Error)):
        raise error
    return failure_of(error, "forward")


def reason_of(error: BaseException) -> str:
    """Give the first line of an error's message, with the operator and the user's line if known.

    Signatures of C++ functions are replaced, since they mean nothing to a user.
    """
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    words = _PYBIND.sub("an argument of a type that the engine does not take", words)
    words = next((ours for theirs, ours in _IN_OTHER_WORDS if theirs in words), words)
    operator, line = blamed(error)
    places = [place for place in (operator, str(line or "")) if place and place not in words]
    return f"{words} ({', '.join(places)})" if places else words


# What PyTorch says of tensors and sizes of its own traces, in the words of those who call them.
_IN_OTHER_WORDS = (
    (
        "Cannot access data pointer of Tensor",
        "forward asks for the memory of a tensor (numpy(), data_ptr(), an extension in C++), which "
        "a captured graph does not have",
    ),
    (
        "SymIntArrayRef expected to contain only concrete integers",
        "forward passes a size, which may differ from call to call, to code that takes plain "
        "integers alone; int(size) makes a graph for each size",
    ),
)
# The beginning of pybind11's message about a wrong argument; the C++ signature follows.
_PYBIND = re.compile(r"\w+\(\): incompatible (function|constructor) arguments.*")


def comes_from_function(error: BaseException) -> bool:
    """Tell whether an error was raised by a torch.autograd.Function that a graph calls.

    Such an error is raised as it is: the engine has not failed, and running the call again would
    repeat the side effects of the Function.
    """
    return hasattr(error, "torch_ort_function")


def may_come_from_a_rule(error: Exception) -> bool:
    """Tell whether an error may be due to a wrong shape or dtype rule of the recorder.

    If a tensor is not what the rule predicted, the engine's check raises UserError and a kernel
    raises RuntimeError. An error that has another cause is raised again when the graph, captured
    by AOTAutograd without these rules, runs.
    """
    return isinstance(error, RuntimeError) and not isinstance(error, Unsupported | InternalError)


def warn(failure: Failure) -> None:
    """Count a fallback, tell watchers of it, and warn at the user's line."""
    counting.count(f"fallbacks_{failure.stage}")
    reason, (_, line) = reason_of(failure.error), blamed(failure.error)
    frame = dynamo_compat.frame_in_capture() if line is None else None
    if frame is not None:
        reason += f", in {frame.where}"
    line = line or calling_line()
    for watcher in _watchers:
        watcher.append(Fallback(failure.stage, reason, line))
    warn_at(
        line,
        f"torch_ort: {failure.stage}: {reason}; this graph runs in eager PyTorch "
        "(set TORCH_ORT_STRICT=1 to get an error instead)",
        FallbackWarning,
    )


def put_back(written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Undo what a run wrote into tensors, of which `written` has copies.

    Tensors that are unchanged are not written, since autograd counts every write in place.
    """
    with torch.no_grad():
        for tensor, copy in written:
            if not torch.equal(tensor, copy):
                tensor.copy_(copy)
