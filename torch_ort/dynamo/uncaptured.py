"""What Dynamo leaves to eager PyTorch without asking our backend: graph breaks, skipped functions.

Each is counted, listed for `torch_ort.explain`, and warned of once unless the user asked for it.
"""

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
    """A place where Dynamo breaks a graph, or a function of which it compiles nothing.

    Prints as `model.py:12: a part of 'forward' (model.py:10): <Dynamo's reason>`.
    """

    function: str  # name and first line, as `'forward' (model.py:10)`
    is_whole: bool  # nothing of the function is compiled
    reason: str  # the name of Dynamo's reason and its explanation
    line: Line  # of the user's program; of torch's own code if no code of the user's is involved
    is_users: bool  # `line` is one of the user's program
    # Whether `function` is the rest of a function after an earlier break; its line is where it
    # begins.
    is_rest: bool = False

    def __str__(self) -> str:
        return f"{self.line}: {self.subject}: {self.reason}"

    @property
    def subject(self) -> str:
        """Say in words what runs in eager PyTorch."""
        if not self.is_users:
            return "code of PyTorch's own"
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
    def counts(self) -> bool:
        """Tell whether operations of the user's program are left to eager PyTorch unintentionally.

        Only such breaks are warned of.
        """
        return self.is_users and not self.is_meant


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
# The reason that torch._dynamo.config.allow_rnn removes.
_RECURRENT = "Attempted to wrap RNN, GRU, or LSTM"


@dataclass
class _Call:
    """A call of a compiled function, while it runs."""

    error_outside: BaseException | None  # an exception that the caller was already handling
    runs: int  # of graphs before the call, in the engine or in eager PyTorch
    has_graphs: bool = False
    breaks: list[Break] = field(default_factory=list)


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[_Call] = []


_calls = _Calls()
_reported: set[Break] = set()
_watchers: list[list[Break]] = []


def note_graph() -> None:
    """Note that Dynamo has asked our backend to compile a graph."""
    if _calls.open:
        _calls.open[-1].has_graphs = True


def forget() -> None:
    """Forget which breaks were warned of; called when compiled code is reset."""
    _reported.clear()


def watching() -> AbstractContextManager[list[Break]]:
    """Give a list to which each break in the block is added; none is warned of or raised."""
    return listening(_watchers)


def of_users(breaks: list[Break], has_graphs: bool) -> list[Break]:
    """Give, once each, the breaks to report: torch's own code only where no graph was captured."""
    return [each for each in dict.fromkeys(breaks) if each.is_users or not has_graphs]


def lines_of(breaks: list[Break]) -> list[str]:
    """Give the lines of a report: how many breaks there are, and each of them."""
    title = f"places that Dynamo leaves to eager PyTorch: {len(breaks)}"
    return [title, *(f"  {each}" for each in breaks)]


def left_out(backend: Any, found: list[LeftOut]) -> None:
    """Take note of what Dynamo has left out of one function; Dynamo calls this.

    In strict mode this raises Unsupported for a whole function. It raises for no graph break, since
    the code before and after the break is captured.
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
        raise _refusal(whole)
    if _calls.open:
        _calls.open[-1].breaks += breaks
    else:
        _tell(telling)


def begin_call(backend: Any, kept: list[Break]) -> Callable[[], bool]:
    """Watch one call; gives a function to call at its end.

    That function tells whether the call has shown what there is to show, so that later calls need
    not be watched. `kept` holds the breaks of earlier calls that raised an error: Dynamo looks at a
    function only once, so these breaks do not come up again.
    """
    call = _Call(sys.exc_info()[1], _runs(), breaks=list(kept))
    _calls.open.append(call)

    def end() -> bool:
        while _calls.open.pop() is not call:  # drops inner calls that have not ended
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
        return False  # the function has no tensor operations, or torch.compile is switched off
    counted = [each for each in call.breaks if each.counts]
    if not counted:  # all of it is code of torch that is called directly
        counting.count("frames_left_to_eager")
        if not _watchers and _is_strict(backend):
            raise _refusal(left[-1])
        counted = left[-1:]
    _tell(counted, nothing_else=True)
    return True


def _tell(breaks: list[Break], nothing_else: bool = False) -> None:
    """Warn once of breaks that were not warned of before: of the first, with the number of others.

    `nothing_else`: the call ran no graph at all.
    """
    new = [each for each in dict.fromkeys(breaks) if each not in _reported]
    if not new or _watchers:
        return
    _reported.update(new)
    new.sort(key=lambda each: not each.is_whole)
    line = new[0].line if new[0].is_users else calling_line()
    graphs = "no graph was captured: " if nothing_else else ""
    more = f"; {len(new) - 1} more place(s) run in eager PyTorch" if len(new) > 1 else ""
    hints = ["torch_ort.explain(model, *inputs) lists every such place"]
    if new[0].reason.startswith(_RECURRENT):
        hints.append(
            "with torch._dynamo.config.allow_rnn = True Dynamo captures a graph for each length"
        )
    if new[0].reason == _HOOKS_OF_SHARDS:
        hints.append("compile each module that fully_shard is applied to by itself")
    if any(each.is_whole for each in new):
        hints.append("set TORCH_ORT_STRICT=1 to get an error instead")
    message = (
        f"torch_ort: capture: {graphs}{new[0].subject} runs in eager PyTorch, because "
        f"{new[0].why}{more} ({'; '.join(hints)})"
    )
    warn_at(line, message, FallbackWarning)


def _refusal(found: Break) -> Unsupported:
    return Unsupported(f"capture: {found.subject} would run in eager PyTorch: {found.why}")


def _break_of(found: LeftOut) -> Break:
    own = Line(found.code.co_filename, found.code.co_firstlineno)
    resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_\d+", found.code.co_name)
    called = resumed[1] if resumed else found.code.co_name
    users = innermost(found.lines)
    line = users or Line(*found.lines[-1]) if found.lines else own
    is_of_shards = bool(found.lines) and _SHARDING in found.lines[-1][0]
    reason = _HOOKS_OF_SHARDS if is_of_shards else _reason_of(found.reason)
    return Break(
        f"'{called}' ({own})", found.is_whole, reason, line, users is not None, resumed is not None
    )


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


def _runs() -> int:
    counters = counting.counters()
    return counters["forward_runs"] + counters["fallbacks"]
