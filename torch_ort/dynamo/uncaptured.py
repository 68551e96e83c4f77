"""What Dynamo leaves to eager PyTorch before our backend is asked: told once, counted, listed."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch_ort._C import Unsupported
from torch_ort.core import counting
from torch_ort.core.scopes import listening
from torch_ort.core.user_code import Line, calling_line, innermost, warn_at
from torch_ort.fallback import FallbackWarning
from torch_ort.pytorch.dynamo_compat import LeftOut


@dataclass(frozen=True)
class Break:
    """A function that Dynamo compiles nothing of, or a place where it breaks the graph."""

    function: str  # as `'forward' (model.py:10)`
    is_whole: bool  # nothing of the function is compiled
    reason: str  # Dynamo's words
    line: Line  # the user's, or torch's own where there is none
    is_users: bool

    def __str__(self) -> str:
        where = "all of" if self.is_whole else "a part of"
        whose = f"{where} {self.function}: " if self.is_users else ""
        return f"{whose}{self.reason} ({self.line})"

    @property
    def is_meant(self) -> bool:
        """Tell whether the user asks for it, or no work is left to eager PyTorch."""
        is_small = not self.is_whole and _BETWEEN_GRAPHS.match(self.reason)
        return bool(is_small or _ASKED.match(self.reason))

    @property
    def counts(self) -> bool:
        """Tell whether work of the user's is left to eager PyTorch that was not meant to be."""
        return self.is_users and not self.is_meant


# What the user asks for, a transform of torch.func around a compiled function among it, and
# generators, whose parts are compiled by themselves.
_ASKED = re.compile(
    r"Call to `torch\._dynamo|Skip (calling|inlining) `torch\.compiler\.disable"
    r"|Unsupported functorch tracing|skip frame due to being in functorch"
    r"|Attempt to trace generator"
)
# What takes numbers out of one graph for the next, and works on no tensor.
_BETWEEN_GRAPHS = re.compile(
    r"generic_jump|Data-dependent branching|Unsupported Tensor\.item"
    r"|.*(builtin operator `print`|`aten\._local_scalar_dense)|logging\.Logger"
)
# Where the hooks of fully_shard are, which ask not to be captured.
_SHARDING = os.path.join("torch", "distributed", "fsdp", "")
_HOOKS_OF_SHARDS = "fully_shard gathers parameters in hooks that Dynamo does not capture"
# What one option of Dynamo's captures.
_RECURRENT = "Attempted to wrap RNN, GRU, or LSTM"


@dataclass
class _Call:
    """A call of a compiled function that is watched."""

    error_outside: BaseException | None  # that the caller is handling
    runs: int
    has_graphs: bool = False
    breaks: list[Break] = field(default_factory=list)


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[_Call] = []


_calls = _Calls()
_told: set[Break] = set()
_watchers: list[list[Break]] = []


def note_graph() -> None:
    """Note that Dynamo has asked our backend for a graph."""
    if _calls.open:
        _calls.open[-1].has_graphs = True


def forget() -> None:
    """Forget what was told; called when compiled code is reset."""
    _told.clear()


def watching() -> AbstractContextManager[list[Break]]:
    """Give a list that everything left out meanwhile is added to; nothing is told or raised."""
    return listening(_watchers)


def left_out(backend: Any, found: list[LeftOut]) -> None:
    """Take note of what Dynamo has left out of one function.

    Raises Unsupported for a whole function where nothing may run in eager PyTorch; around a break
    of a graph, all else may have been captured.
    """
    breaks = [_break_of(each) for each in found]
    for each in breaks:
        if each.is_users:
            counting.count("frames_left_to_eager" if each.is_whole else "graph_breaks")
    for watcher in _watchers:
        watcher.extend(breaks)
    telling = [each for each in breaks if each.counts]
    whole = next((each for each in telling if each.is_whole), None)
    if whole is not None and not _watchers and _is_strict(backend):
        raise Unsupported(f"capture: Dynamo leaves to eager PyTorch: {whole}")
    if _calls.open:
        _calls.open[-1].breaks += breaks
    else:
        _tell(telling)


def begin_call(backend: Any, kept: list[Break]) -> Callable[[], bool]:
    """Watch one call; what this gives is called at its end, and tells whether that was enough.

    `kept` are breaks of earlier calls that have raised: Dynamo looks at a function once.
    """
    call = _Call(sys.exc_info()[1], _runs(), breaks=list(kept))
    _calls.open.append(call)

    def end() -> bool:
        while _calls.open.pop() is not call:  # one that was begun and never ended
            pass
        kept.clear()
        if sys.exc_info()[1] is not call.error_outside:  # the call has raised
            kept.extend(call.breaks)
            return False
        if call.has_graphs or _runs() != call.runs:
            _tell([each for each in call.breaks if each.counts])
            return True
        return _end_without_graphs(backend, call)

    return end


def _end_without_graphs(backend: Any, call: _Call) -> bool:
    left = [each for each in call.breaks if each.is_whole and not each.is_meant]
    if not left:
        return False  # there was nothing to do, or torch.compile is switched off
    counted = [each for each in call.breaks if each.counts]
    if not counted:  # torch's own code, called by the user
        counting.count("frames_left_to_eager")
        if not _watchers and _is_strict(backend):
            raise Unsupported(f"capture: Dynamo leaves to eager PyTorch: {left[-1]}")
        counted = left[-1:]
    _tell(counted, nothing_else=True)
    return True


def _tell(breaks: list[Break], nothing_else: bool = False) -> None:
    """Warn of what is left out and was not told of before: the first, and how many there are."""
    new = [each for each in dict.fromkeys(breaks) if each not in _told]
    if not new or _watchers:
        return
    _told.update(new)
    new.sort(key=lambda each: not each.is_whole)
    more = f", and {len(new) - 1} more" if len(new) > 1 else ""
    line = new[0].line if new[0].is_users else calling_line()
    graphs = "no graph was captured: " if nothing_else else ""
    hints = "torch_ort.explain lists all"
    if new[0].reason.startswith(_RECURRENT):
        hints += ", torch._dynamo.config.allow_rnn = True captures it for each length"
    if new[0].reason == _HOOKS_OF_SHARDS:
        hints += ", compile by itself each part that fully_shard takes"
    if any(each.is_whole for each in new):
        hints += ", TORCH_ORT_STRICT=1 raises instead"
    message = (
        f"torch_ort: capture: {graphs}Dynamo leaves to eager PyTorch: {new[0]}{more} ({hints})"
    )
    warn_at(line, message, FallbackWarning)


def _break_of(found: LeftOut) -> Break:
    own = Line(found.code.co_filename, found.code.co_firstlineno)
    called = re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", found.code.co_name)
    users = innermost(found.lines)
    line = users or Line(*found.lines[-1]) if found.lines else own
    is_of_shards = bool(found.lines) and _SHARDING in found.lines[-1][0]
    reason = _HOOKS_OF_SHARDS if is_of_shards else _reason_of(found.reason)
    return Break(f"'{called}' ({own})", found.is_whole, reason, line, users is not None)


def _reason_of(words: str) -> str:
    """Give the name of Dynamo's reason and its explanation, without hints and addresses."""
    name, _, rest = words.strip().partition("\n")
    found = re.search(r"^\s*Explanation: (.+)$", rest, re.MULTILINE)
    if name.startswith("generic_jump"):
        return f"{name}: a branch on the numbers of a tensor"
    return f"{name}: {found[1].rstrip('. ')}" if found else name


def _is_strict(backend: Any) -> bool:
    from torch_ort import options  # a program as well, which the package's import leaves alone

    given = backend.keywords
    chosen, _ = options.resolve_compiled(given.get("options"), given.get("mode"))
    return chosen.strict


def _runs() -> int:
    counters = counting.counters()
    return counters["forward_runs"] + counters["fallbacks"]
