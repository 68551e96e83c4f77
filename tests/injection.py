"""Failures that tests put into the engine's runs."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from torch_ort import _C
from torch_ort.read.fx_reader import FxReader


def at_place(place: str, make_error: Callable[[], BaseException], passes: int = 0) -> None:
    """Raise where the engine passes a place (csrc/base/failpoint.h), after some passes of it.

    It ends with the test.
    """
    count = itertools.count()

    def fail(passed: str) -> None:
        if passed == place and next(count) >= passes:
            raise make_error()

    _C.set_failpoint(fail)


def into_reading(patch: pytest.MonkeyPatch, operator: str, message: str) -> None:
    """Have the reader of FX graphs refuse each call of an operator that has this in its name."""
    add = FxReader._add_call

    def refuse(self: FxReader, node: fx.Node) -> None:
        if operator in str(node.target):
            raise _C.Unsupported(message)
        add(self, node)

    patch.setattr(FxReader, "_add_call", refuse)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def into_forward(patch: pytest.MonkeyPatch, wrap: Wrap) -> None:
    """Wrap what runs forward: graphs without gradients, those of AOTAutograd, recorded ones."""
    patch.setattr(_C, "run_forward", wrap(_C.run_forward))
    patch.setattr(_C.RecordedStep, "__call__", wrap(_C.RecordedStep.__call__))


def into_backward(patch: pytest.MonkeyPatch, wrap: Wrap) -> None:
    """Wrap what runs backward."""
    run_backward = wrap(_C.run_backward)
    make = _C.RecordedStep

    def make_watched(*args: Any) -> _C.RecordedStep:
        step = make(*args)
        step.watch_first_backward(run_backward)  # another may watch later, and calls the same
        return step

    patch.setattr(_C, "run_backward", run_backward)
    patch.setattr(_C, "RecordedStep", make_watched)
