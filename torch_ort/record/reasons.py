"""Why a recording ends: what is meant to be AOTAutograd's, and what is a bug of the recorder."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch_ort import _C
from torch_ort.core.refusals import HandOver
from torch_ort.core.user_code import OUR_FOLDER, TORCH_FOLDER, blamed
from torch_ort.rules.symbols import is_beyond_sizes

_logger = logging.getLogger("torch_ort.recorder")

_bugs_logged: set[str] = set()
_entries: set[CodeType] = set()


def log_hand_over(error: Exception, is_bug: bool) -> None:
    """Log why a capture is handed over; once at WARNING where it is a bug of ours."""
    words = f"{type(error).__name__}: {error}"
    first_line = words.splitlines()[0]
    if is_bug and first_line not in _bugs_logged:
        _bugs_logged.add(first_line)
        _, line = blamed(error)
        where = f"{line}: " if line else ""
        _logger.warning(
            "%sAOTAutograd captures this graph, which takes longer, since torch_ort's recorder has "
            "a bug: %s (please report it; TORCH_ORT_STRICT=1 raises it)", where, first_line,
        )  # fmt: skip
    _logger.info("recorder: %s", words, exc_info=error)


def enters_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that calls the recorded program: errors from there may be the program's."""
    _entries.add(function.__code__)
    return function


def is_reason_to_hand_over(error: Exception) -> bool:
    """Tell whether a recording is meant to end with this error; if not, it is a bug of ours.

    Meant are what says so by its type, what sizes cannot express, and errors of the recorded
    program, which has them in eager PyTorch as well.
    """
    if isinstance(error, HandOver | _C.Unsupported) or is_beyond_sizes(error):
        return True
    return not isinstance(error, _C.Error) and _is_raised_by_program(error)


def _is_raised_by_program(error: Exception) -> bool:
    """Tell whether the user's code raises an error, or PyTorch as that code calls it."""
    is_torchs = False
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        code = frame.f_code
        if code.co_filename.startswith(TORCH_FOLDER) or code.co_name == "__torch_function__":
            is_torchs = True  # a mode of ours only passes calls on
        elif code.co_filename.startswith(OUR_FOLDER):
            return is_torchs and code in _entries
        else:
            return True
    return True
