"""States of random generators, so that what runs again draws the same numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class TorchGenerators:
    """The states of PyTorch's default generators, as they were when this was made."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class PythonGenerators:
    """The states of Python's and numpy's global generators, as they were when this was made."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if numpy else None

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def drawn_from(self) -> str:
        """Name a generator that was drawn from since; empty if none was."""
        if random.getstate() != self._python:
            return "Python's random"
        if self._numpy is None:
            return ""
        _, keys, position, *_ = sys.modules["numpy"].random.get_state()
        if position != self._numpy[2] or (keys != self._numpy[1]).any():
            return "numpy.random"
        return ""


_thread = threading.local()  # `draws`: of the capture that runs in this thread


class Draws:
    """Tells whether code sets PyTorch's default generators, besides drawing from them.

    Nothing is drawn in a capture, so each draw seeds them anew: what they are seeded with
    otherwise, or put back to, stands out at the next draw, and at the end.
    """

    def __init__(self) -> None:
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        self._generators = [torch.default_generator, *cuda]
        self._seed = 0x6F727400  # any that no program takes
        self.are_set = False
        self._seed_all()

    def note(self) -> None:
        """Tell that something is drawn here."""
        self.check()
        self._seed += 1
        self._seed_all()

    def check(self) -> None:
        """Look whether somebody has set a generator."""
        seeds = {generator.initial_seed() for generator in self._generators}
        self.are_set = self.are_set or seeds != {self._seed}

    def _seed_all(self) -> None:
        for generator in self._generators:
            generator.manual_seed(self._seed)


@contextmanager
def watched_draws() -> Iterator[Draws]:
    """Watch what code in here does to PyTorch's default generators, which are put back."""
    before = TorchGenerators()
    outer = getattr(_thread, "draws", None)
    _thread.draws = draws = Draws()
    try:
        yield draws
        draws.check()
    finally:
        _thread.draws = outer
        before.restore()


def note_draw() -> None:
    """Tell the capture that runs in this thread, if one does, that something is drawn here."""
    draws = getattr(_thread, "draws", None)
    if draws is not None:
        draws.note()


class DrawsNoted(TorchFunctionMode):
    """Takes every call of torch's functions for a draw, where nothing tells which ones draw."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Call one."""
        note_draw()
        return func(*args, **(kwargs or {}))
