"""States of PyTorch's random generators, so that a call that runs again draws the same numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_ort.core.scopes import set_here
from torch_ort.pytorch import patches


class TorchGenerators:
    """The states of PyTorch's default generators, as they were when this was made."""

    def __init__(self) -> None:
        with _not_watched():
            self._cpu = torch.get_rng_state()
            self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Put the states back."""
        with _not_watched():
            torch.set_rng_state(self._cpu)
            if self._cuda:
                torch.cuda.set_rng_state_all(self._cuda)

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """Draw in the block what was drawn from these states; go on as before after it."""
        now = TorchGenerators()
        self.restore()
        try:
            yield
        finally:
            now.restore()


class Seeding:
    """Tells whether code sets PyTorch's default generators, besides drawing from them.

    Nothing is drawn in a capture. So a state that is put back undoes draws if any were noted since
    it was taken.
    """

    def __init__(self) -> None:
        self._initial = torch.initial_seed()
        self._is_noted = False  # `note` has found a generator set
        self._is_fresh = False  # nothing has been drawn since a state was taken
        self.is_elsewhere = False  # another thread has set a generator

    def note_draw(self) -> None:
        """Tell that something is drawn here."""
        self._is_fresh = False

    def note(self, generator: torch.Generator, name: str, args: tuple) -> Any:
        """Take note of what is done to a generator, instead of doing it."""
        if name == "get_state":
            self._is_fresh = True
            return generator.get_state()
        puts_back = name == "set_state" and self._is_fresh
        with _not_watched():  # to compare is no draw
            if not puts_back or not torch.equal(args[0], generator.get_state()):
                self._is_noted = True
        return generator.initial_seed() if name == "seed" else generator

    @property
    def is_found(self) -> bool:
        """Tell whether one was set, or that of the CPU was seeded by its own methods."""
        is_seeded = torch.initial_seed() != self._initial and not self.is_elsewhere
        return self._is_noted or is_seeded


_SETTERS = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")
_thread = threading.local()  # `seeding`: of the capture that runs in this thread
_seedings: list[Seeding] = []  # of all threads


class _Watched:
    """Stands for a default generator; what sets it in a thread that captures is only noted.

    Other threads draw on undisturbed, and set what they want.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        seeding = getattr(_thread, "seeding", None)
        if seeding is not None and name in ("get_state", *_SETTERS):
            return lambda *args: seeding.note(self._generator, name, args)
        if name in _SETTERS:
            for each in list(_seedings):
                each.is_elsewhere = True
        return getattr(self._generator, name)


def _all_watched(generators: tuple) -> tuple:
    return tuple(map(_Watched, generators))


@contextmanager
def watched_seeding() -> Iterator[Seeding]:
    """Find out whether code in the block sets PyTorch's default generators; it keeps its effect."""
    seeding = Seeding()
    _seedings.append(seeding)
    try:
        with (
            set_here(_thread, "seeding", seeding),
            patches.GENERATOR.by(_Watched),
            patches.CUDA_GENERATORS.by(_all_watched),
        ):
            yield seeding
    finally:
        _seedings.remove(seeding)


def _not_watched() -> AbstractContextManager[None]:
    """Let ourselves set generators in a capture."""
    return set_here(_thread, "seeding", None)


def note_draw() -> None:
    """Tell the capture that runs in this thread, if one does, that something is drawn here."""
    seeding = getattr(_thread, "seeding", None)
    if seeding is not None:
        seeding.note_draw()


class DrawsNoted(TorchFunctionMode):
    """Counts every call of torch's functions as a draw, where it is unknown which ones draw."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Call one."""
        if func is not torch._C._set_grad_enabled:  # Dynamo calls it before it puts states back
            note_draw()
        return func(*args, **(kwargs or {}))
