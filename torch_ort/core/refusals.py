"""Exceptions that say why a graph cannot be recorded, or cannot be captured at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_ort import _C


class HandOver(Exception):
    """The recorder cannot capture a graph, so AOTAutograd captures it. The message says why."""


class Refused(HandOver):
    """PyTorch itself refuses the arguments of an operator, and will do so again in eager mode."""


class NestedTensor(HandOver):
    """A recorded function makes or takes a nested tensor."""


class NoCapture(_C.Unsupported):
    """Neither the recorder nor AOTAutograd can capture a graph."""


class FirstCallDiffers(NoCapture):
    """The call sets up what later ones rely on, and sets a flag: it has to run in eager PyTorch.

    `places` are those of numbers among what it sets.
    """

    def __init__(self, places: Iterable[Any] = ()) -> None:
        self.places = [*places]
        super().__init__("forward does something else in its first call than in later ones")


class GatheredInside(NoCapture):
    """Hooks gather the parameters of sub-modules around calls that a graph would not make."""


@contextmanager
def blamed_on_forward() -> Iterator[None]:
    """Mark errors that are due to what forward does; its sub-modules may be free of it.

    Errors that a stage of the engine raises, which have that stage's name, are not marked.
    """
    try:
        yield
    except _C.Unsupported as error:
        if not hasattr(error, "stage"):
            blame_forward(error)
        raise


def blame_forward(error: Exception) -> None:
    """Mark one error as due to what forward does, or takes."""
    error.torch_ort_due_to_forward = True


def is_due_to_forward(error: Exception) -> bool:
    """Tell whether an error is one that `blamed_on_forward` has marked."""
    return getattr(error, "torch_ort_due_to_forward", False)
