"""Replaces attributes of torch for the time of a capture, and restores them.

The first thread that needs one puts ours in place, the last one puts back what was there. What
stands there asks whether the thread that has come is one of those (or works for one, as autograd's
own threads do), and calls torch's own if not. The table of them is patches.py.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from torch_ort import _C
from torch_ort.pytorch import versions
from torch_ort.pytorch.private import FrameAction, FrameExecStrategy
from torch_ort.pytorch.versions import is_within


class Scope(enum.Enum):
    """Who finds something else in torch."""

    THREAD = "threads that are inside, and autograd's own that work for them"
    CONTEXT = "a context of Python's, as torch's settings are"
    PROCESS = "everybody; what does not concern us goes on to torch's own"


class _Here(threading.local):
    ours: Mapping[Patch, Any] | None = None


_here = _Here()
_lock = threading.RLock()
_KEY = "torch_ort_patches"
# Nothing of ours may stay with a thread after a capture. PyTorch passes it to threads of its own.
# When such a thread ends, it waits for Python's lock to release the object. A thread that destroys
# a process group may hold this lock while it waits for that thread. Before torch 2.13 the object
# cannot be removed.
_CAN_TAKE_BACK = is_within("2.13", "")


def _stash_takes_a_reference() -> bool:
    """Tell whether PyTorch frees a reference to what it is given there that was not given to it.

    It does so before torch 2.12, when another object takes the place or the thread ends.
    """
    probe, key = object(), f"{_KEY}_probe"
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    is_taken = sys.getrefcount(probe) == before
    if is_taken:
        _add_reference(probe)
    if _CAN_TAKE_BACK:
        torch._C._remove_obj_from_tls(key)
    return is_taken


def _add_reference(value: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_STASH_TAKES_A_REFERENCE = not versions.missing and _stash_takes_a_reference()
_NOTHING: Mapping[Patch, Any] = types.MappingProxyType({})
_ABSENT = object()


def not_for_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo leave a function's own frame alone, where code that it compiles runs into ours."""
    return _skipped(function, FrameAction.DEFAULT)


def nothing_for_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo leave a function alone, and all that it calls."""
    return _skipped(function, FrameAction.SKIP)


def _skipped(function: Callable[..., Any], called: FrameAction) -> Callable[..., Any]:
    if versions.missing:
        return function
    strategy = FrameExecStrategy(FrameAction.SKIP, called)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


@not_for_dynamo
def _ours() -> Mapping[Patch, Any]:
    """Give what this thread finds instead of torch's own."""
    if _here.ours is not None:
        return _here.ours
    # PyTorch passes this to the threads of a backward.
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else _NOTHING


def _hand_on(ours: Mapping[Patch, Any]) -> None:
    """Let threads of torch's that work for this one find the same."""
    if _STASH_TAKES_A_REFERENCE:
        _add_reference(ours)
    torch._C._stash_obj_in_tls(_KEY, ours)


@contextmanager
def _with(patch: Patch, ours: Any) -> Iterator[None]:
    """Let this thread be inside of a patch; `ours` is what it finds there."""
    outer, around = _here.ours, _ours()
    was_handed_on = torch._C._is_key_in_tls(_KEY)
    _here.ours = {**around, patch: ours}
    _hand_on(_here.ours)
    try:
        yield
    finally:
        _here.ours = outer
        if was_handed_on or not _CAN_TAKE_BACK:
            _hand_on(around)
        else:
            torch._C._remove_obj_from_tls(_KEY)


class Patch:
    """A row: one attribute of an object of torch's, written as `module:object.attribute`.

    It is in versions of torch `since` one and before `until` another; empty: there is no such
    limit. `stays` says why it is not undone; empty: it is, by the last thread that leaves.
    """

    def __init__(
        self, target: str, why: str, *, since: str = "", until: str = "",
        scope: Scope = Scope.THREAD, stays: str = "",
    ) -> None:  # fmt: skip
        self.target = target
        self.why = why
        self.since = since
        self.until = until
        self.scope = scope
        self.stays = stays
        self._num_inside = 0
        self._theirs: Any = None  # torch's own function, as it is called
        self._before: Any = None  # what the owner had before
        self._standing: Any = None  # what we have put there

    def __repr__(self) -> str:
        return f"Patch({self.target!r})"

    @functools.cached_property
    def place(self) -> tuple[Any, str]:
        """Give the object of torch's, and the name of its attribute."""
        module, _, path = self.target.partition(":")
        *parts, name = path.split(".")
        return functools.reduce(getattr, parts, importlib.import_module(module)), name

    @property
    def exists(self) -> bool:
        """Tell whether the attribute exists now."""
        try:
            return hasattr(*self.place)
        except (ImportError, AttributeError):
            return False

    @property
    def applies(self) -> bool:
        """Tell whether this version of torch is one of the row's."""
        return is_within(self.since, self.until)

    def check(self) -> None:
        """Raise Unsupported if this version of torch lacks what it should have."""
        if not self.exists:
            path = self.target.replace(":", ".")
            raise versions.refusal(path, "replaces while it captures")

    def _own(self) -> Any:
        owner, name = self.place
        return vars(owner).get(name, _ABSENT)

    @contextmanager
    def _in_place(self, make: Callable[[Any], Any]) -> Iterator[None]:
        """Replace the attribute by what `make` makes of torch's own, which asks for its caller."""
        self.check()
        with _lock:
            if self._num_inside == 0:
                self._put(make)
            self._num_inside += 1
        try:
            yield
        finally:
            with _lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    self._take_back()

    def _put(self, make: Callable[[Any], Any]) -> None:
        owner, name = self.place
        if self._standing is not None and self._own() is not self._before:
            return  # other code has replaced ours, and still calls it
        self._before = self._own()
        self._theirs = getattr(owner, name, self._missing)
        self._standing = make(self._theirs)
        setattr(owner, name, self._standing)

    def _take_back(self) -> None:
        owner, name = self.place
        if self._own() is not self._standing:
            return  # the replacement by other code calls ours
        if self._before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, self._before)
        self._standing = None

    def _missing(self, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"{self.target}: this version of torch does not have it")


class Function(Patch):
    """A function or a method."""

    def by(self, ours: Callable[..., Any]) -> AbstractContextManager[None]:
        """Call `ours(theirs, ...)` in this thread, where `theirs` is what it would call otherwise.

        Does nothing in versions of torch that are none of the row's. Raises Unsupported if one of
        these lacks the function.
        """
        return self._by(ours) if self._takes_part() else _nothing()

    @contextmanager
    def _by(self, ours: Callable[..., Any]) -> Iterator[None]:
        with self._in_place(self._asking):
            theirs = _ours().get(self, self._theirs)
            with _with(self, functools.partial(ours, theirs)):
                yield

    def as_torch_has_it(self) -> AbstractContextManager[None]:
        """Call torch's own in this thread, whatever is called around."""
        return _with(self, self.theirs)

    @not_for_dynamo
    def theirs(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's own."""
        return self._theirs(*args, **kwargs)

    def stay(self, ours: Callable[..., Any]) -> None:
        """Call `ours(theirs, ...)` in all threads, for as long as the process lives."""
        with _lock:
            if self._standing is None:
                self._put(lambda theirs: functools.wraps(theirs)(_passing(ours, theirs)))

    def _takes_part(self) -> bool:
        return self.applies

    def _asking(self, theirs: Callable[..., Any]) -> Any:
        @functools.wraps(theirs)
        @not_for_dynamo
        def asking(*args: Any, **kwargs: Any) -> Any:
            return _ours().get(self, theirs)(*args, **kwargs)

        return asking


def _passing(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def passing(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return passing


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class Addition(Function):
    """A method that a class of torch's lacks; where a version of torch has it, that is called."""

    def check(self) -> None:
        """Do nothing: it is ours."""

    def _takes_part(self) -> bool:
        return not self.exists or self._num_inside > 0


class UnseenMethod(Function):
    """A method of which Dynamo in another thread must not see that Python's code stands there."""

    def _asking(self, theirs: Callable[..., Any]) -> Any:
        return method_of_c(super()._asking(theirs))


class MethodOfC(Function):
    """A method that C implements: names that a program has bound to it earlier call ours, too."""

    def _put(self, make: Callable[[Any], Any]) -> None:
        self._theirs = _call_replaced
        asking = make(self._theirs)

        @not_for_dynamo
        def ours(self: Any, args: tuple, kwargs: dict | None) -> Any:
            return asking(self, *args, **(kwargs or {}))

        _C.replace_method(self._descriptor(), ours)

    def _take_back(self) -> None:
        _C.restore_method()

    def is_in_place(self) -> bool:
        """Tell whether it is replaced now."""
        return _C.is_replaced(self._descriptor())

    def _descriptor(self) -> Any:
        owner, name = self.place
        return vars(owner)[name]


@not_for_dynamo
def _call_replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _C.call_replaced(self, args, kwargs)


class Answer(Function):
    """The code of a function without arguments: the function itself is what others hold.

    Dynamo knows it by its identity.
    """

    def _own(self) -> Any:
        return getattr(*self.place)

    def _asking(self, theirs: types.CodeType) -> Any:
        owner, _ = self.place
        self._theirs = types.FunctionType(theirs, owner.__globals__, owner.__name__)
        return self._ask.__code__

    def __init__(self, target: str, why: str, ask: Callable[[], Any]) -> None:
        super().__init__(target, why)
        self._ask = ask  # calls `answer`, with the globals of torch's function

    @not_for_dynamo
    def answer(self) -> Any:
        """Give what the function answers in this thread."""
        return _ours().get(self, self._theirs)()


class Registry(Patch):
    """The code of torch's function that registers backends by name.

    Threads that are about to call it hold the function itself.
    """

    def __init__(self, target: str, why: str, ask: Callable[..., Any], **words: Any) -> None:
        super().__init__(target, why, **words)
        self._ask = ask  # calls `register`, with the globals of torch's function
        self._backend: Any = None

    def take(self, backend: Callable[..., Any]) -> None:
        """Let several threads at once register a backend of ours, for as long as there are any.

        torch registers a backend where it looks up a name and does not find it, and raises an error
        if there is one by then. For a moment it also has the name without the backend.
        """
        with _lock:
            self._backend = backend
            owner, name = self.place
            self._theirs = types.FunctionType(
                owner.__code__, owner.__globals__, owner.__name__, owner.__defaults__
            )
            setattr(owner, name, self._ask.__code__)

    def register(self, backend: Any, name: str | None, tags: Sequence[str]) -> Any:
        """Register a backend; one of ours may be registered under its name already."""
        if backend is self._backend:
            backend._tags = tuple(tags)
            known = self._theirs.__globals__["_COMPILER_FNS"]
            if known.setdefault(name or backend.__name__, backend) is backend:
                return backend
        return self._theirs(backend, name, tags)


class Value(Patch):
    """An object that asks by itself which thread has come."""

    def by(self, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
        """Put there what `make` gives of torch's own; all that are inside make the same."""
        return self._in_place(make)


class Setting(Patch):
    """A setting of torch's: of a context of Python's, or of the process before torch 2.12.

    There, what the configuration holds asks which thread has come.
    """

    def by(self, value: Any) -> AbstractContextManager[None]:
        """Give it another value in the block."""
        if isinstance(self._own().user_override, ContextVar):
            owner, name = self.place
            return owner.patch(**{name: value})
        return self._by_thread(value)

    @contextmanager
    def _by_thread(self, value: Any) -> Iterator[None]:
        with self._in_place(functools.partial(_EntryByThread, self)), _with(self, value):
            yield

    def _own(self) -> Any:
        owner, name = self.place
        return owner._config[name]

    def _put(self, make: Callable[[Any], Any]) -> None:
        owner, name = self.place
        self._before = self._own()
        owner._config[name] = make(self._before)

    def _take_back(self) -> None:
        owner, name = self.place
        owner._config[name] = self._before


class _EntryByThread:
    """What a configuration of torch's holds for a setting: ours for threads that are inside."""

    def __init__(self, patch: Setting, theirs: Any) -> None:
        vars(self).update(_patch=patch, _theirs=theirs)

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(self._theirs, name)
        return _ours().get(self._patch, theirs) if name == "user_override" else theirs

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "user_override" and self._patch in (_here.ours or ()):
            _here.ours = {**_here.ours, self._patch: value}
            _hand_on(_here.ours)
        else:
            setattr(self._theirs, name, value)


class Names(Patch):
    """A list of torch's that takes names of ours."""

    def add(self, names: Sequence[str]) -> None:
        """Add some."""
        owner, name = self.place
        for each in names:
            getattr(owner, name)(each)


class Elsewhere(Patch):
    """What C++ of ours replaces; `target` is torch's function that does it."""


def method_of_c(function: Callable[..., Any]) -> Any:
    """Give a method that runs a function, and that looks like one of C's to who looks at it."""
    make = ctypes.pythonapi.PyInstanceMethod_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.py_object]
    return make(function)


class KernelsByThread(MutableMapping):
    """The Python kernels of an operator: ours for threads that are inside."""

    def __init__(self, patch: OperatorKernels, operator: Any, ours: Mapping) -> None:
        self._patch = patch
        self._operator = operator
        self._theirs = operator.py_kernels
        self._ours = ours

    def _now(self) -> Any:
        is_ours = self._operator in _ours().get(self._patch, ())
        return self._ours if is_ours else self._theirs

    def __getitem__(self, key: Any) -> Any:
        return self._now()[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._theirs[key] = kernel

    def __delitem__(self, key: Any) -> None:
        del self._theirs[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def copy(self) -> dict:
        """Give those that the thread finds."""
        return dict(self._now())


class _Forgetful(dict):
    """A cache that keeps nothing: what it would keep is right for one thread alone."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class OperatorKernels(Patch):
    """What PyTorch's Python dispatcher calls for operators, and what it remembers of it.

    `*` in `target` is any operator.
    """

    def __init__(self, target: str, why: str) -> None:
        super().__init__(target, why)
        # By operator: the number of blocks that are open, torch's kernels, and torch's cache.
        self._operators: dict[Any, tuple[int, dict, dict]] = {}

    def of(self, operator: Any) -> dict:
        """Give torch's own kernels of an operator."""
        found = self._operators.get(operator)
        return operator.py_kernels if found is None else found[1]

    @contextmanager
    def by(self, ours: Mapping[Any, Mapping]) -> Iterator[None]:
        """Let operators have other kernels in this thread; all that are inside give the same."""
        with _lock:
            for operator, kernels in ours.items():
                self._enter(operator, kernels)
        try:
            with _with(self, _ours().get(self, frozenset()) | ours.keys()):
                yield
        finally:
            with _lock:
                for operator in ours:
                    self._leave(operator)

    def _enter(self, operator: Any, kernels: Mapping) -> None:
        if operator not in self._operators:
            self._operators[operator] = (0, operator.py_kernels, operator._dispatch_cache)
            operator.py_kernels = KernelsByThread(self, operator, kernels)
            operator._dispatch_cache = _Forgetful()
        num_inside, *theirs = self._operators[operator]
        self._operators[operator] = (num_inside + 1, *theirs)

    def _leave(self, operator: Any) -> None:
        num_inside, kernels, cache = self._operators[operator]
        if num_inside > 1:
            self._operators[operator] = (num_inside - 1, kernels, cache)
            return
        del self._operators[operator]
        operator.py_kernels = kernels
        cache.clear()  # a kernel may have been registered in the meantime
        operator._dispatch_cache = cache
