"""Who runs a graph when the engine does not: the one place that catches the engine's errors.

`within_boundary` stands between a call of the user's and its result, on both roads. What captures
and the engine raise does not get past it: the call ends in eager PyTorch, or in eager's own error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torch_ort._C import DeviceError, Error, InternalError, Unsupported, UserError
from torch_ort.core import counting
from torch_ort.core.user_code import blamed, calling_line, warn_at
from torch_ort.pytorch import dynamo_compat
from torch_ort.pytorch.generators import TorchGenerators

FORWARD_MODE = "forward-mode AD: an input has a tangent, which a captured graph would lose"


class FallbackWarning(UserWarning):
    """A graph runs in eager PyTorch; the message says why."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Name the stage that an error comes from; the innermost name stays."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "stage"):
            error.stage = name
        raise


@contextmanager
def asked_for() -> Iterator[None]:
    """Mark errors of what the user has asked the engine for besides results: files, own passes.

    They are raised, whatever else may end in eager PyTorch.
    """
    try:
        yield
    except (UserError, OSError) as error:
        error.torch_ort_asked_for = True
        raise


@dataclass(frozen=True)
class Failure:
    """Why the engine does not run a call: the error, and the stage that it comes from."""

    error: Exception
    stage: str


# What is done instead of a run that has failed; gives its result.
Instead = Callable[[Failure], Any]


def within_boundary(
    engine: Callable[[], Any], instead: Instead, stage_name: str, state: Any = None
) -> Any:
    """Give what `engine` gives; where it fails, undo what it drew and wrote, and do another thing.

    `stage_name` stands for the stage of errors that name none. What the engine writes into stands
    in `state.written` meanwhile. Raises what is no failure of the engine: see `failure_of`.
    """
    random = TorchGenerators()
    if state is not None:
        state.written = []
    try:
        return engine()
    except DeviceError:
        raise  # nothing can be put back on a device that is lost
    except Exception as error:
        random.restore()
        if state is not None:
            put_back(state.written)
        failure = failure_of(error, stage_name)
    finally:
        if state is not None:
            state.written = None
    return instead(failure)


def failure_of(error: Exception, stage_name: str) -> Failure:
    """Describe a failure of the engine.

    Raises the error again where it is a message to Dynamo, or comes from a torch.autograd.Function
    of the user's, from what the user has asked for, or from a device that is lost: eager PyTorch
    would fail there in words that do not tell why.
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

    Raises the error again unless no step has run (a plan for new sizes has failed), or an error of
    ours comes from a graph that is repeatable: it neither writes nor draws. A kernel's own error is
    what eager would raise.
    """
    has_begun = not hasattr(error, "torch_ort_nothing_ran")
    if has_begun and not (is_repeatable and isinstance(error, Error)):
        raise error
    return failure_of(error, "forward")


def reason_of(error: BaseException) -> str:
    """Give the first line of an error's words, its operator and the user's line; no internals."""
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    words = _PYBIND.sub("an argument of a type that the engine does not take", words)
    operator, line = blamed(error)
    places = [place for place in (operator, str(line or "")) if place and place not in words]
    return f"{words} ({', '.join(places)})" if places else words


# A signature of C++ follows.
_PYBIND = re.compile(r"\w+\(\): incompatible (function|constructor) arguments.*")


def comes_from_function(error: BaseException) -> bool:
    """Tell whether an error is one of a torch.autograd.Function that a graph calls.

    It is raised as it is: nothing of the engine has failed, and running again does twice what the
    Function does.
    """
    return hasattr(error, "torch_ort_function")


def may_come_from_a_rule(error: Exception) -> bool:
    """Tell whether a tensor may not be what a rule of the recorder said.

    The engine checks types and raises UserError, a kernel raises RuntimeError; one of its own comes
    again.
    """
    return isinstance(error, RuntimeError) and not isinstance(error, Unsupported | InternalError)


def warn(failure: Failure) -> None:
    """Count a fallback and say so once."""
    counting.count(f"fallbacks_{failure.stage}")
    reason, (_, line) = reason_of(failure.error), blamed(failure.error)
    frame = dynamo_compat.frame_in_capture() if line is None else None
    if frame is not None:
        reason += f", in {frame.where}"
    warn_at(
        line or calling_line(),
        f"torch_ort: {failure.stage}: {reason}; this graph runs in eager PyTorch "
        "(TORCH_ORT_STRICT=1 raises instead)",
        FallbackWarning,
    )


def put_back(written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Undo what a run wrote; what it did not reach is left alone, for autograd watches edits."""
    with torch.no_grad():
        for tensor, copy in written:
            if not torch.equal(tensor, copy):
                tensor.copy_(copy)
