"""Which sizes of its inputs a recording leaves open."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

from torch_ort.core.scopes import set_here

_here = threading.local()  # `dims`

Dims = Mapping[str, Collection[int]]


def only_open(dims: Dims | None) -> AbstractContextManager[None]:
    """Let recordings that begin in the block leave only these dims open, by name of an input.

    None: all dims.
    """
    return set_here(_here, "dims", dims)


def open_dims() -> Dims | None:
    """Give the dims that a recording which begins now leaves open; None: all."""
    return getattr(_here, "dims", None)
