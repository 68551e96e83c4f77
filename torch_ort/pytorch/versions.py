"""The contract with torch: the versions that are tested, and how others are met.

- `TESTED` names the versions. Any other one runs with a warning, once in a process, and only where
  it has all private names that the package uses.
- private.py is the table of these names. All are looked up as it is loaded, and the files of this
  room import them from there. For a name that is not there stands a class that has no instances
  (`Missing`), so that torch_ort can be imported, and its optimizers run. Each capture is refused by
  the missing names before it begins (`check`), and eager PyTorch runs in its place. It is
  not worth telling captures apart that could do without: a lost name means that what is around it
  has changed.
- Rows of patches.py say `since` and `until` which version torch has what they replace. A row is
  checked when it is used; without what it replaces the recorder refuses by that name, and
  AOTAutograd or eager PyTorch takes over. Rows that stay in place for good count as private names.
- What differs between versions is asked by `is_within`, in the file of its subject in this room.
  Nothing else compares versions (tests/style/test_versions.py).
"""

from __future__ import annotations

import importlib
import threading
import warnings
from typing import Any

import torch

from torch_ort._C import Unsupported

TESTED = ("2.11", "2.12", "2.13", "2.14")


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


def tested() -> str:
    """Say the tested versions in words: `2.11, 2.12 and 2.13`."""
    *others, last = TESTED
    return f"{', '.join(others)} and {last}" if others else last


def warn_of_untested() -> None:
    """Warn, once in a process, if torch_ort has not been tested with the installed torch."""
    global _has_warned
    here = "{}.{}".format(*minor(torch.__version__))
    with _lock:
        if here in TESTED or _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"torch_ort is tested with torch {tested()}, and this is {torch.__version__}: "
        "what it relies on may have changed, so compare a few steps with eager PyTorch",
        stacklevel=2,
    )


def look_up(module: str, name: str) -> Any:
    """Give what a module of torch has under a name, which may have dots.

    Raises ImportError or AttributeError if it has no such thing.
    """
    found = importlib.import_module(module)
    first, *rest = name.split(".")
    if not hasattr(found, first):
        return importlib.import_module(f"{module}.{first}")
    for part in (first, *rest):
        found = getattr(found, part)
    return found


_USE = "uses to capture graphs"
missing: list[str] = []  # names that this torch should have, and has not


class Missing(type):
    """The class of what stands for a name that this torch lacks.

    That is a class, which others may be derived from and isinstance() may ask for, and which has
    no instances: to make one, or to call the function that it stands for, raises Unsupported.
    """

    path: str  # in torch

    def __getattr__(cls, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{cls.path}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise Unsupported."""
        raise refusal(cls.path, _USE)


def placeholder(path: str) -> Missing:
    """Give what stands for a name that this torch lacks."""
    return Missing(path.rpartition(".")[2], (), {"path": path})


def refusal(path: str, use: str, num_others: int = 0) -> Unsupported:
    """Give the error that says that this torch lacks a name, and what torch_ort does with it."""
    others = f", nor {num_others} more names" if num_others else ""
    return Unsupported(
        f"torch {torch.__version__} has no {path}{others}, which torch_ort {use}; it is tested "
        f"with torch {tested()}"
    )


def check() -> None:
    """Raise Unsupported if this torch lacks a private name that captures use."""
    if missing:
        raise refusal(missing[0], _USE, len(missing) - 1)
