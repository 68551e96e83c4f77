"""Whether code draws from the global generators of Python and numpy, which no graph can repeat."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch_ort.core.refusals import NoCapture
from torch_ort.core.scopes import set_here


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

    def drawn_from(self) -> list[str]:
        """Name the generators that were drawn from since."""
        drawn = [_OF_PYTHON] if random.getstate() != self._python else []
        if self._numpy is not None:
            _, keys, position, *_ = sys.modules["numpy"].random.get_state()
            if position != self._numpy[2] or (keys != self._numpy[1]).any():
                drawn.append(_OF_NUMPY)
        return drawn


_OF_PYTHON, _OF_NUMPY = "Python's random", "numpy.random"


class PythonDraws:
    """Tells whether this thread draws from Python's and numpy's global generators, from now on.

    Their states belong to all threads. So if one has changed while other threads live, it is
    unclear who has drawn, unless calls of the generators are watched (`watched_draws`).
    """

    def __init__(self) -> None:
        self._before = PythonGenerators()

    def end(self) -> str:
        """Name a generator that this thread drew from, whose state is put back; empty if none.

        Raises DrawsUnclear.
        """
        drawn = self._before.drawn_from()
        watched: _WatchedDraws | None = getattr(_thread, "draws", None)
        before = self._before
        if watched is not None:
            drawn, before = [name for name in drawn if watched.is_ours(name)], watched.before
        elif drawn and threading.active_count() > 1:
            raise DrawsUnclear(before)
        if drawn:
            before.restore()
        return " and ".join(drawn)


class DrawsUnclear(NoCapture):
    """A generator was drawn from, by this thread or by another one; `before` are the states."""

    def __init__(self, before: PythonGenerators) -> None:
        self.before = before
        super().__init__("forward, or another thread, draws from Python's random or numpy.random")


@contextmanager
def watched_draws(unclear: DrawsUnclear) -> Iterator[None]:
    """Let PythonDraws find out which threads call the global generators."""
    watched = _WatchedDraws(unclear.before)
    with _watching_draws, watched.installed(), set_here(_thread, "draws", watched):
        yield


_watching_draws = threading.RLock()  # one thread at a time replaces the functions
_thread = threading.local()  # `draws`: what watched_draws() notes


class _WatchedDraws:
    """Stands in front of the functions of `random` and `numpy.random`, and notes who calls them."""

    def __init__(self, before: PythonGenerators) -> None:
        self.before = before
        self._here = threading.get_ident()
        self._callers: set[tuple[str, bool]] = set()  # a generator, and whether it was called here

    def is_ours(self, generator: str) -> bool:
        """Tell whether this thread has drawn, which is the answer where nobody was seen to."""
        return (generator, True) in self._callers or (generator, False) not in self._callers

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand there in the block."""
        noting = dict(self._functions())
        # Programs import the functions themselves, too.
        holders = [vars(module) for module in [*sys.modules.values()] if type(module) is ModuleType]
        replaced = [
            (names, name, value)
            for names in holders
            for name, value in [*names.items()]
            if id(value) in noting
        ]
        for names, name, value in replaced:
            names[name] = noting[id(value)]
        try:
            yield
        finally:
            for names, name, value in replaced:
                names[name] = value

    def _functions(self) -> Iterator[tuple[int, Callable[..., Any]]]:
        """Give what stands in front of each function, by the `id` of that."""
        modules = {_OF_PYTHON: random}
        if "numpy" in sys.modules:
            modules[_OF_NUMPY] = sys.modules["numpy"].random
        for generator, module in modules.items():
            state = module.shuffle.__self__  # all of them are its methods
            for name, function in vars(module).items():
                if getattr(function, "__self__", None) is state and "state" not in name:
                    yield id(function), self._noting(function, generator)

    def _noting(self, function: Callable[..., Any], generator: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._callers.add((generator, threading.get_ident() == self._here))
            return function(*args, **kwargs)

        return noted
