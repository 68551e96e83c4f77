"""Ctrl-C between two steps.

An exception that Ctrl-C raises wherever the program stands may hit half a step, or a callback of
the interpreter, where Python drops it. A handler that takes a note loses nothing.
"""

from __future__ import annotations

import signal
from types import FrameType


class Interrupt:
    """Context that turns the first Ctrl-C into a request, and leaves the second as it is."""

    def __init__(self) -> None:
        self.asked = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Interrupt:
        """Take over Ctrl-C, unless the process was told to ignore it."""
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        """Give Ctrl-C back."""
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise KeyboardInterrupt if it was asked for."""
        if self.asked:
            raise KeyboardInterrupt
