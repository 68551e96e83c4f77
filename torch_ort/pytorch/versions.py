"""The versions of torch that torch_ort is tested with, and how others are met.

What differs between versions is said where it is used: by `since` and `until` in the rows of
patches.py, else in the `*_compat.py` of its subject. A version that is not tested runs with a
warning. If it lacks a name that a row replaces, captures are refused by that name, and eager
PyTorch takes over.
"""

from __future__ import annotations

import threading
import warnings

import torch

TESTED = ("2.11", "2.13")


def minor(version: str) -> tuple[int, int]:
    """Give the first two numbers of a version: (2, 13) of `2.13.0+cpu`."""
    first, second, *_ = version.split(".")
    return int(first), int(second)


def is_within(since: str, until: str) -> bool:
    """Tell whether the installed torch is one since a version, and before another.

    Empty: there is no such limit.
    """
    here = minor(torch.__version__)
    return not (since and here < minor(since)) and not (until and here >= minor(until))


_lock = threading.Lock()
_has_warned = False


def warn_of_untested() -> None:
    """Warn, once in a process, if torch_ort has not been tested with the installed torch."""
    global _has_warned
    here = "{}.{}".format(*minor(torch.__version__))
    with _lock:
        if here in TESTED or _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"torch_ort is tested with torch {' and '.join(TESTED)}, and this is {torch.__version__}: "
        "what it relies on may have changed, so compare a few steps with eager PyTorch",
        stacklevel=2,
    )
