"""Writes into tensors of which several elements are one number in memory.

In eager PyTorch such a write raises, or, where an operator only warns (`masked_fill_` of expanded
tensors), the last element that is written stays. By functionalization, which makes new tensors of
writes during a capture, all that these elements change by adds up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch_ort import _C
from torch_ort.core.refusals import NoCapture
from torch_ort.core.user_code import Line


@contextmanager
def overlapping_writes_refused(
    line_of: Callable[[FrameType], Line | None] = lambda frame: None,
) -> Iterator[None]:
    """Refuse what the block has captured if it makes such a write.

    `line_of` gives the user's line that runs, if it is known, for the frame that calls an operator.
    Raises NoCapture at the end of the block.
    """
    found: list[str] = []

    def report(name: str) -> None:
        line = line_of(sys._getframe(1))
        found.append(f"{name.removeprefix('aten::')}" + (f" ({line})" if line else ""))

    with _C.OverlappingWrites(report):
        yield
    if found:
        raise NoCapture(
            f"{found[0]} writes into a tensor of which several elements are one number in memory, "
            "such as an expanded one; clone() it first"
        )
