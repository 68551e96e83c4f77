"""What Dynamo leaves to eager PyTorch without asking our backend: graph breaks, skipped functions.

Each is counted, listed for `torch_ort.explain`, and warned of once unless the user asked for it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch_ort import _C, fallback
from torch_ort._C import Unsupported
from torch_ort.core import counting
from torch_ort.core.scopes import listening
from torch_ort.core.user_code import Line, calling_line, innermost, named, warn_at
from torch_ort.fallback import FallbackWarning
from torch_ort.pytorch import dynamo_compat
from torch_ort.pytorch.dynamo_compat import ByCode, Compiled, LeftOut, Looked


@dataclass(frozen=True)
class Break:
    """A place where Dynamo breaks a graph, or a function of which it compiles nothing.

    Prints as `model.py:12: a part of 'forward' (model.py:10): <Dynamo's reason>`.
    """

    # Name and first line, as `'forward' (model.py:10)`; for code of torch's own what was called, as
    # `the compiled Sequential`.
    function: str
    is_whole: bool  # nothing of the function is compiled
    reason: str  # the name of Dynamo's reason and its explanation
    line: Line  # of the user's program
    is_users: bool  # it is in the user's code, at `line`; else in torch's, called at `line`
    # Whether `function` is the rest of a function after an earlier break; its line is where it
    # begins.
    is_rest: bool = False

    def __str__(self) -> str:
        return f"{self.line}: {self.subject}: {self.reason}"

    @property
    def subject(self) -> str:
        """Say in words what runs in eager PyTorch."""
        whole = "the rest of" if self.is_rest else "all of"
        return f"{whole if self.is_whole else 'a part of'} {self.function}"

    @property
    def why(self) -> str:
        """Give the reason and the line, as warnings and errors say it."""
        return f"Dynamo cannot capture it: {self.reason} ({self.line})"

    @property
    def is_meant(self) -> bool:
        """Tell whether the user asked for this, or no tensor operation is left to eager PyTorch."""
        is_small = not self.is_whole and _BETWEEN_GRAPHS.match(self.reason)
        return bool(is_small or _ASKED.match(self.reason))

    @property
    def is_of_program(self) -> bool:
        """Tell whether operations of the user's program are left to eager PyTorch.

        What Dynamo leaves out of torch's own code is mostly free of any. Of a module of torch.nn
        with backward hooks, it leaves out what the module does.
        """
        return self.is_users or self.reason.startswith(_BACKWARD_HOOKS)

    @property
    def counts(self) -> bool:
        """Tell whether operations of the user's program are left to eager PyTorch unintentionally.

        Only such breaks are warned of.
        """
        return self.is_of_program and not self.is_meant


# Reasons that the user has asked for, among them transforms of torch.func around a compiled
# function; also generators, whose parts are compiled separately.
_ASKED = re.compile(
    r"Call to `torch\._dynamo|Skip (calling|inlining) `torch\.compiler\.disable"
    r"|Unsupported functorch tracing|skip frame due to being in functorch"
    r"|Attempt to trace generator"
)
# Reasons where only values of tensors are read between two graphs, for a branch or a message.
_BETWEEN_GRAPHS = re.compile(
    r"generic_jump|Data-dependent branching|Unsupported Tensor\.item"
    r"|.*(builtin operator `print`|`aten\._local_scalar_dense)|logging\.Logger"
)
# The folder of the hooks of fully_shard, which are marked as not to be compiled.
_SHARDING = os.path.join("torch", "distributed", "fsdp", "")
_HOOKS_OF_SHARDS = "fully_shard gathers parameters in hooks that Dynamo does not capture"
_BACKWARD_HOOKS = "Module-level backwards hooks"
# The reason that torch._dynamo.config.allow_rnn removes.
_RECURRENT = "Attempted to wrap RNN, GRU, or LSTM"


@dataclass
class _Seen:
    """What Dynamo has done with a function since it was compiled."""

    is_captured: bool = False  # what Dynamo made of a part of it runs
    has_graphs: bool = False  # with tensor operations
    is_at_limit: bool = False
    breaks: dict[Break, None] = field(default_factory=dict)
    skipped: str = ""  # Dynamo's reason for passing it over

    def add(self, looked: Looked, breaks: list[Break]) -> None:
        """Note that Dynamo has looked at a part of it."""
        self.is_captured |= looked.is_captured
        self.is_at_limit |= looked.is_at_limit
        self.breaks.update(dict.fromkeys(breaks))
        self.skipped = looked.skipped or self.skipped

    @property
    def is_empty(self) -> bool:
        """Tell whether Dynamo has looked at nothing of it."""
        return not (self.is_captured or self.is_at_limit or self.breaks or self.skipped)


@dataclass
class _Call:
    """A call of a compiled function, while it runs."""

    function: Watched
    error_outside: BaseException | None  # an exception that the caller was already handling
    runs: int  # of graphs in the engine, before the call
    runs_in_eager: int  # and of graphs in eager PyTorch
    breaks: list[Break]
    has_graphs: bool = False


class _Calls(threading.local):
    def __init__(self) -> None:
        # The function to call at the end of a call holds it. That is not called if PyTorch itself
        # raises an error as the call ends.
        self.open: list[weakref.ref[_Call]] = []
        self.begun = 0

    def innermost(self) -> _Call | None:
        """Give the call that runs now."""
        while self.open:
            call = self.open[-1]()
            if call is not None:
                return call
            self.open.pop()
        return None

    def close(self, call: _Call) -> None:
        """Take a call from the open ones, and with it the inner ones that have not ended."""
        places = [i for i, each in enumerate(self.open) if each() is call]
        if places:
            del self.open[places[0] :]


_calls = _Calls()
_seen = ByCode(_Seen)
_reported: set[Break] = set()
_watchers: list[list[Break]] = []


def note_graph() -> None:
    """Note that Dynamo has asked our backend to compile a graph."""
    call = _calls.innermost()
    if call is not None:
        call.has_graphs = call.function.seen.has_graphs = True


def forget() -> None:
    """Forget what Dynamo has done and what was warned of; called when compiled code is reset."""
    _reported.clear()
    _seen.clear()


def watching() -> AbstractContextManager[list[Break]]:
    """Give a list to which each break in the block is added; none is warned of or raised."""
    return listening(_watchers)


def of_users(breaks: list[Break], has_graphs: bool) -> list[Break]:
    """Give, once each, the breaks to report: torch's own code only where nothing else is known."""
    of_program = [each for each in dict.fromkeys(breaks) if each.is_of_program]
    return of_program if of_program or has_graphs else [*dict.fromkeys(breaks)]


def lines_of(breaks: list[Break]) -> list[str]:
    """Give the lines of a report: how many breaks there are, and each of them."""
    title = f"places that Dynamo leaves to eager PyTorch: {len(breaks)}"
    return [title, *(f"  {each}" for each in breaks)]


def looked_at(backend: Any, looked: Looked) -> None:
    """Take note of what Dynamo has done with one function; Dynamo calls this.

    In strict mode this raises Unsupported for a whole function. It raises for no graph break, since
    the code before and after the break is captured.
    """
    call = _calls.innermost()
    words = "code of PyTorch's own" if call is None else call.function.words
    breaks = [_break_of(each, words) for each in looked.left]
    _seen[looked.code].add(looked, breaks)
    for each in breaks:
        if each.is_of_program:
            counting.count("frames_left_to_eager" if each.is_whole else "graph_breaks")
    for watcher in _watchers:
        watcher.extend(breaks)
    telling = [each for each in breaks if each.counts]
    whole = next((each for each in telling if each.is_whole), None)
    if whole is not None and not _watchers and _is_strict(backend):
        raise _refusal(whole)
    if call is not None:
        call.function.seen.add(looked, breaks)
        call.breaks += breaks
    else:
        _tell(telling)


class Watched:
    """A compiled function, whose calls are watched: each is to run something in the engine."""

    def __init__(self, backend: Any, compiled: Compiled) -> None:
        self.words = compiled.words
        self.seen = _Seen()
        self._backend = backend
        self._compiled = compiled
        # Breaks of calls that raised an error. Dynamo looks at a function only once, so they do not
        # come up again.
        self._kept: list[Break] = []
        self._left: Break | None = None  # why the latest calls ran in eager PyTorch
        self._is_counted = False  # as one of which Dynamo compiles nothing

    def begin(self) -> Callable[[], None]:
        """Watch one call; gives a function to call at its end."""
        runs = _C.forward_runs_of_thread(), fallback.runs_in_eager()
        call = _Call(self, sys.exc_info()[1], *runs, [*self._kept])
        _calls.open.append(weakref.ref(call))
        _calls.begun += 1
        return functools.partial(self._end, call)

    def _end(self, call: _Call) -> None:
        _calls.close(call)
        if sys.exc_info()[1] is not call.error_outside:  # the call has raised
            self._kept = call.breaks
            return
        self._kept = []
        has_run = _C.forward_runs_of_thread() != call.runs
        has_run_in_eager = fallback.runs_in_eager() != call.runs_in_eager
        if has_run or has_run_in_eager or call.has_graphs:
            _tell([each for each in call.breaks if each.counts])
        if has_run:
            self._left = None
        else:
            is_known = has_run_in_eager or dynamo_compat.eager_asked_for(self._compiled)
            self._end_without_engine(call, is_known)

    def _end_without_engine(self, call: _Call, is_known: bool) -> None:
        """Count a call of which nothing ran in the engine, unless there was nothing to run.

        `is_known`: the program has asked for it, or was warned that its graph has failed.
        """
        seen = self._seen_of_it()
        left = _most_telling(call.breaks) or self._left
        if left is None and not seen.has_graphs:
            left = _most_telling(seen.breaks)
        self._left = left
        is_explained = is_known or seen.breaks or seen.is_at_limit
        if left is None and not is_explained:
            if seen.is_captured:
                return  # it has no tensor operations
            reason = seen.skipped or dynamo_compat.why_not_looked_at(self._compiled.codes)
            left = Break(self.words, True, reason, calling_line(), is_users=False)
        if left is not None and not is_known:
            self._say(left, call.breaks)
        counting.count("calls_left_to_eager")

    def _seen_of_it(self) -> _Seen:
        """Give what Dynamo has done, perhaps in calls of another function with the same code."""
        all_seen = [self.seen, *(_seen[code] for code in self._compiled.codes)]
        return next((each for each in all_seen if not each.is_empty), self.seen)

    def _say(self, left: Break, breaks: list[Break]) -> None:
        """Count a function of which nothing ran, and warn of it; raises Unsupported if strict."""
        if not (left.counts or self._is_counted):  # it was not counted as Dynamo looked at it
            counting.count("frames_left_to_eager")
        self._is_counted = True
        if not left.is_users:  # it is in the call of what was compiled, of which nothing is left
            left = dataclasses.replace(left, is_whole=True)
        if not _watchers and _is_strict(self._backend):
            raise _refusal(left)
        others = [each for each in breaks if each.counts and each.is_users and each != left]
        _tell([left, *others], nothing_else=True)


def watched_forward(backend: Any, words: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function that was assigned to `forward` of a compiled module, with its calls watched.

    It runs in place of what was compiled, which it may call.
    """

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before = _C.forward_runs_of_thread(), _calls.begun
        return after_call(before, function(*args, **kwargs))

    # In the frame of the call, an error that is kept would keep the result.
    def after_call(before: tuple[int, int], result: Any) -> Any:
        if before == (_C.forward_runs_of_thread(), _calls.begun):
            reason = f"{named(function)} is its forward now, and does not call the compiled one"
            left = Break(words, True, reason, calling_line(), is_users=False)
            if _is_strict(backend):
                raise _refusal(left)
            _tell([left])
            counting.count("calls_left_to_eager")
        return result

    return forward


def _most_telling(breaks: Iterable[Break]) -> Break | None:
    """Give the break that explains best why nothing was captured; None if all are meant."""
    left = [each for each in breaks if not each.is_meant]
    return max(left, key=lambda each: (each.is_users, each.is_whole), default=None)


def _tell(breaks: list[Break], nothing_else: bool = False) -> None:
    """Warn once of breaks that were not warned of before: of the first, with the number of others.

    `nothing_else`: the call ran no graph at all.
    """
    new = [each for each in dict.fromkeys(breaks) if each not in _reported]
    if not new or _watchers:
        return
    _reported.update(new)
    new.sort(key=lambda each: not each.is_whole)
    graphs = "no graph was captured: " if nothing_else else ""
    more = f"; {len(new) - 1} more place(s) run in eager PyTorch" if len(new) > 1 else ""
    hints = ["torch_ort.explain(model, *inputs) lists every such place"]
    if new[0].reason.startswith(_RECURRENT):
        hints.append(
            "with torch._dynamo.config.allow_rnn = True Dynamo captures a graph for each length"
        )
    if new[0].reason.startswith(_BACKWARD_HOOKS):
        hints.append("take the backward hooks off, or compile the modules inside by themselves")
    if new[0].reason == _HOOKS_OF_SHARDS:
        hints.append("compile each module that fully_shard is applied to by itself")
    if nothing_else or any(each.is_whole for each in new):
        hints.append("set TORCH_ORT_STRICT=1 to get an error instead")
    message = (
        f"torch_ort: capture: {graphs}{new[0].subject} runs in eager PyTorch, because "
        f"{new[0].why}{more} ({'; '.join(hints)})"
    )
    warn_at(new[0].line, message, FallbackWarning)


def _refusal(found: Break) -> Unsupported:
    return Unsupported(f"capture: {found.subject} would run in eager PyTorch: {found.why}")


def _break_of(found: LeftOut, around: str) -> Break:
    """Describe what Dynamo left out; `around` names the function that was called."""
    own = Line(found.code.co_filename, found.code.co_firstlineno)
    resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_\d+", found.code.co_name)
    called = resumed[1] if resumed else found.code.co_name
    users = innermost(found.lines)
    is_of_shards = bool(found.lines) and _SHARDING in found.lines[-1][0]
    reason = _HOOKS_OF_SHARDS if is_of_shards else _reason_of(found.reason)
    if users is None:
        return Break(around, found.is_whole, reason, calling_line(), is_users=False)
    name = f"'{called}' ({own})"
    return Break(name, found.is_whole, reason, users, True, is_rest=resumed is not None)


def _reason_of(words: str) -> str:
    """Give the name of Dynamo's reason and its explanation, without its hints and its links."""
    name, _, rest = words.strip().partition("\n")
    found = re.search(r"^\s*Explanation: (.+)$", rest, re.MULTILINE)
    if name.startswith("generic_jump"):
        return f"{name}: the program branches on the value of a tensor"
    return f"{name}: {found[1].rstrip('. ')}" if found else name


def _is_strict(backend: Any) -> bool:
    # Imported late: `python -m torch_ort.options` must be the first to import the options.
    from torch_ort import options

    given = backend.keywords
    chosen, _ = options.resolve_compiled(given.get("options"), given.get("mode"))
    return chosen.strict
