"""Ranks agree on each graph that communicates, once it has been captured.

All ranks of a group must start the same collectives in the same order, or they wait for each other
for ever. So each rank tells the others, through the store of the group, which collectives its graph
has, or why it has none, and goes on when all have told: if one cannot capture the graph, all run it
in eager PyTorch. No collective is needed for that, and nothing happens in later calls.

A rank that captures alone, since only its inputs have changed, finds that the ranks have agreed on
these collectives before, and goes on at once. If they have not, the others never tell, and it
raises an error after the timeout of the group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch_ort import _C
from torch_ort.engine.program import Program
from torch_ort.fallback import asked_for
from torch_ort.pytorch import ranks
from torch_ort.pytorch.dynamo_compat import passes_through

T = TypeVar("T")

_PREFIX = "torch_ort"
_FAILED = "failed: "
# By group: what the ranks have agreed on, and how often they have told each other.
_agreed: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
_rounds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def agree(groups: Mapping[str, Any], capture: Callable[[], T], programs: Sequence[Program]) -> T:
    """Capture, which fills `programs`, and agree with all ranks of the groups that all have.

    Raises what `capture` raises, Unsupported if another rank cannot capture, and UserError if the
    ranks have different collectives or do not all capture.
    """
    try:
        result = capture()
    except Exception as error:
        if not passes_through(error):
            words = next(iter(str(error).splitlines()), "") or type(error).__name__
            for group in groups.values():
                _tell_and_wait(group, _FAILED + words)
        raise
    for name, group in groups.items():
        digest = digest_of(programs, name)
        if digest not in _agreed.setdefault(group, set()):
            _check(group, digest)
            _agreed[group].add(digest)
    return result


def forget() -> None:
    """Forget what has been agreed on; the ranks do so together, when compiled code is reset."""
    _agreed.clear()


def collectives_of(programs: Sequence[Program], group: str) -> list[str]:
    """Describe the collectives of graphs among the ranks of a group, in their order."""
    return [line for program in programs for line in _lines(program, group)]


def digest_of(programs: Sequence[Program], group: str) -> str:
    """Give a digest that is equal on ranks that communicate alike."""
    text = "\n".join(collectives_of(programs, group))
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(program: Program, group: str) -> Iterator[str]:
    types = program.graph.types()
    for node in program.graph.nodes():
        attributes = node["attrs"]
        operator = attributes.get("operator", "")
        if not operator.startswith("_c10d_functional::") or attributes.get("group_name") != group:
            continue
        given = [(types[name][0], types[name][1]) for name in node["inputs"]]
        if "all_to_all" in operator:  # the sizes differ between ranks
            given = [(dtype, len(sizes)) for dtype, sizes in given]
        rest = {
            name: attributes[name]
            for name in ("reduce_op", "group_size", "src")
            if name in attributes
        }
        yield f"{operator} {given} {rest}"


@contextmanager
def _naming(group: Any) -> Iterator[None]:
    with asked_for():
        try:
            yield
        except _C.UserError as error:
            raise _C.UserError(f"ranks of group '{group.group_name}': {error}") from None


def _key(number: int, rank: int) -> str:
    return f"{_PREFIX}/{number}/{rank}"


def _tell_and_wait(group: Any, words: str) -> list[str]:
    """Tell the other ranks something; give what each has told."""
    number = _rounds[group] = _rounds.get(group, 0) + 1
    store = ranks.store_of(group)
    keys = [_key(number, rank) for rank in range(group.size())]
    store.set(keys[group.rank()], words)
    timeout = ranks.timeout_of(group)
    try:
        store.wait(keys, timeout)
    except Exception:  # of a timeout, or because the rank that has the store is gone
        late = [rank for rank, key in enumerate(keys) if not _is_there(store, key)]
        with _naming(group):
            raise _C.UserError(
                f"rank {group.rank()} captures a graph that communicates, and rank "
                f"{', '.join(map(str, late))} does not within {timeout}; all ranks "
                "of a group must call the same compiled functions with the same sizes"
            ) from None
    return [store.get(key).decode() for key in keys]


def _check(group: Any, digest: str) -> None:
    told = _tell_and_wait(group, digest)
    for rank, words in enumerate(told):
        if words.startswith(_FAILED):
            raise _C.Unsupported(
                f"rank {rank} of group '{group.group_name}' cannot capture this graph, so that all "
                f"run it in eager PyTorch: {words.removeprefix(_FAILED)}"
            )
    other = next((rank for rank, words in enumerate(told) if words != digest), None)
    if other is not None:
        with _naming(group):
            raise _C.UserError(
                f"rank {group.rank()} and rank {other} have captured graphs that communicate "
                "differently; all ranks of a group must call the same compiled functions with the "
                "same sizes, and under the same conditions"
            )


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except Exception:  # the store is gone
        return False
