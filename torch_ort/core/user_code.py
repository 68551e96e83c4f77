"""Lines of the user's program, at which warnings and errors point."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch

# What the paths of torch's and of our own files begin with.
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
OUR_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_THE_USERS = (TORCH_FOLDER, OUR_FOLDER, "<")  # generated code, such as "<string>", too
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
    users = (Line(path, number) for path, number in reversed(list(lines)) if is_users(path))
    return next(users, None)


def calling_line() -> Line:
    """Give the user's line that is running, in this thread."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def named(function: Any) -> str:
    """Name a function and where it begins, for messages."""
    inner = inspect.unwrap(function)
    inner = inner.func if isinstance(inner, functools.partial) else inner
    code = getattr(inner, "__code__", None)
    if code is None:
        return f"a {type(function).__qualname__}"
    return f"'{code.co_name}' ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def warn_at(line: Line, message: str, category: type[Warning]) -> None:
    """Warn, as if from a line."""
    warnings.warn_explicit(message, category, line.path, line.number)


@contextmanager
def blaming(operator: str, line: Line | None) -> Iterator[None]:
    """Note on an error which operator it is about, and the user's line; the innermost stays."""
    try:
        yield
    except Exception as error:
        blame(error, operator, line)
        raise


def blame(error: Exception, operator: str, line: Line | None) -> None:
    """Note on an error which operator it is about, and the user's line, unless that is known."""
    if operator and not hasattr(error, "torch_ort_blames"):
        error.torch_ort_blames = operator, line


def blamed(error: BaseException) -> tuple[str, Line | None]:
    """Give the operator that an error is about, and the user's line; empty and None if unknown."""
    found = error
    while found is not None and not hasattr(found, "torch_ort_blames"):
        found = found.__cause__
    operator, line = getattr(found, "torch_ort_blames", ("", None))
    return operator, line or _line_in_traceback(error)


def _line_in_traceback(error: BaseException | None) -> Line | None:
    """Give the user's line that has raised an error, where code of the user's was called."""
    line = None
    while error is not None:
        line = innermost(_lines(error.__traceback__)) or line
        error = error.__cause__
    return line


def _lines(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
