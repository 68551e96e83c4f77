"""States of random generators, so that what runs again draws the same numbers."""

from __future__ import annotations

import random
import sys

import torch


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
