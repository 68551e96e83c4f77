"""Where the user's own code is: the lines that warnings point at."""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    "<",  # code that was made
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))


class Line(NamedTuple):
    """A line of a file."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}:{self.number}"


def is_users(path: str) -> bool:
    """Tell whether a file is neither torch's nor ours nor Python's own."""
    if path.startswith(_NOT_THE_USERS):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or path.startswith(_INSTALLED)


def innermost(lines: Iterable[tuple[str, int]]) -> Line | None:
    """Give the last of some lines that is the user's."""
    users = [Line(path, number) for path, number in lines if is_users(path)]
    return users[-1] if users else None


def calling_line() -> Line:
    """Give the user's line that is running, in this thread."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def warn_at(line: Line, message: str, category: type[Warning]) -> None:
    """Warn, as if from a line."""
    warnings.warn_explicit(message, category, line.path, line.number)
