"""Calls a function with a module as soon as the program has imported it.

Importing this package must not import others, which take seconds; but their names are to know ours,
whichever the user imports first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

Visit = Callable[[ModuleType], None]

_lock = threading.RLock()
_visits: dict[str, list[Visit]] = {}  # by the name of a module that is not imported yet


def after_import(module: str, visit: Visit) -> None:
    """Call `visit` with the module: now if it is imported, else once it is.

    An error of `visit` is raised by the statement that imports the module.
    """
    with _lock:
        found = sys.modules.get(module)
        is_imported = found is not None and not getattr(found.__spec__, "_initializing", False)
        if not is_imported:
            _visits.setdefault(module, []).append(visit)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            return
    visit(found)


def forget(module: str, visit: Visit) -> None:
    """Take back a call of `after_import` whose module was not imported since."""
    with _lock:
        if visit in _visits.get(module, []):
            _visits[module].remove(visit)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, for modules with registered functions."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _visits:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads as another loader does, and then calls the registered functions."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module has no reference to this loader.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        with _lock:
            visits = _visits.pop(module.__name__, [])
        for visit in visits:
            visit(module)


_finder = _Finder()
