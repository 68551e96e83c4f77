"""Exceptions that say why a graph cannot be recorded, or cannot be captured at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_ort import _C


class HandOver(Exception):
    """What a recording cannot do: the capture is made by AOTAutograd. The words say why."""


class Refused(HandOver):
    """PyTorch itself refuses the arguments of an operator; it does so again in earnest."""


class NoCapture(_C.Unsupported):
    """What AOTAutograd cannot do either."""


class GatheredInside(NoCapture):
    """Parameters of a module are gathered around calls of its parts, which no graph makes."""


@contextmanager
def blamed_on_forward() -> Iterator[None]:
    """Mark what cannot be captured because of what forward does; a part of it may do without.

    What a stage of the engine refuses, which names itself, is no such thing.
    """
    try:
        yield
    except _C.Unsupported as error:
        error.torch_ort_due_to_forward = not hasattr(error, "stage")
        raise


def is_due_to_forward(error: Exception) -> bool:
    """Tell whether an error is one that `blamed_on_forward` has marked."""
    return getattr(error, "torch_ort_due_to_forward", False)
