"""Ranks agree on each graph that communicates, once it has been captured.

All ranks of a group must start the same collectives in the same order, or they wait for each other
for ever. So each rank tells the others, through the store of the group, which collectives its graph
has, or why it has none, and goes on when all have told: if one cannot capture the graph, all run it
in eager PyTorch, and if they communicate differently, all capture again without the passes that
repeat and join collectives. No collective is needed for that, and nothing happens in later calls.

A rank that captures alone, since only its inputs have changed, finds that the ranks have agreed on
these collectives before, and goes on at once. If they have not, the others never tell, and it
raises an error after the timeout of the group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from torch_ort import _C
from torch_ort.engine.program import Program
from torch_ort.fallback import asked_for
from torch_ort.pytorch import ranks
from torch_ort.pytorch.dynamo_compat import passes_through

T = TypeVar("T")

COLLECTIVES = "_c10d_functional::"  # what the names of operators that communicate begin with
_FAILED = "failed: "
# By group: what the ranks have agreed on, and how often they have told each other.
_agreed: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
_rounds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def agree(
    groups: dict[str, Any],
    capture: Callable[[], T],
    state: Any,
    inside: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> T:
    """Capture, which fills `state.programs`, and agree with all ranks of the groups that all have.

    `inside` describes, by group, what is communicated where programs do not show it.

    Where the ranks communicate differently after the passes, since some decide by what one rank
    sees, all capture again without those. Raises what `capture` raises, Unsupported if another rank
    cannot capture, and UserError if the ranks have different collectives or do not all capture.
    """
    result = _agree_once(groups, capture, state, inside)
    if result is not None:
        return result[0]
    state.programs.clear()
    by_rank = (each.name for each in _C.passes() if each.decides_by_rank)
    state.options = replace(state.options, disable=(*state.options.disable, *by_rank))
    result = _agree_once(groups, capture, state, inside)
    if result is None:
        first = next(iter(groups.values()))
        _refuse(
            first,
            f"rank {first.rank()} and others have captured graphs that communicate differently; "
            "all ranks of a group must call the same compiled functions with the same sizes, and "
            "under the same conditions",
        )
    return result[0]


def _agree_once(
    groups: dict[str, Any],
    capture: Callable[[], T],
    state: Any,
    inside: Mapping[str, Sequence[str]],
) -> tuple[T] | None:
    """Capture and agree; None if the ranks communicate differently."""
    error: Exception | None = None
    digests: dict[str, str] = {}
    try:
        result = capture()
    except Exception as raised:
        if not groups or passes_through(raised):
            raise
        error = raised
    else:
        names = names_of(state.programs) | inside.keys()
        groups |= ranks.groups_named(names)
        state.communicates = bool(names)
        digests = {name: digest_of(state.programs, name, inside.get(name, ())) for name in groups}
        is_known = all(digests[name] in _agreed.get(group, ()) for name, group in groups.items())
        if not state.communicates or is_known:
            return (result,)
    words = _FAILED + (_first_line(error)) if error is not None else ""
    told: dict[str, list[str]] = {}
    # What a rank of one group tells reaches the ranks of its other groups in the next round.
    for _ in groups:
        for name, group in groups.items():
            told[name] = _tell_and_wait(group, words or digests[name])
            words = words or next((each for each in told[name] if each.startswith(_FAILED)), "")
    if error is not None:
        raise error
    if words:
        _raise_for_other(told)
    is_same = all(len(set(each)) == 1 for each in told.values())
    # A difference in one group is one in all.
    for _ in groups:
        for group in groups.values():
            heard = _tell_and_wait(group, "same" if is_same else "different")
            is_same = set(heard) == {"same"}
    if not is_same:
        return None
    for name, group in groups.items():
        _agreed.setdefault(group, set()).add(digests[name])
    return (result,)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _raise_for_other(told: Mapping[str, Sequence[str]]) -> None:
    """Raise Unsupported, since another rank has failed."""
    for name, each in told.items():
        for rank, words in enumerate(each):
            if words.startswith(_FAILED):
                raise _C.Unsupported(
                    f"rank {rank} of group '{name}' cannot capture this graph, so that all run it "
                    f"in eager PyTorch: {words.removeprefix(_FAILED)}"
                )


def forget() -> None:
    """Forget what has been agreed on; the ranks do so together, when compiled code is reset."""
    _agreed.clear()


def names_of(programs: Sequence[Program]) -> set[str]:
    """Name the groups that graphs communicate in."""
    return {name for program in programs for name in _group_names(program.graph)}


def digest_of(programs: Sequence[Program], group: str, inside: Sequence[str]) -> str:
    """Give a digest that is equal on ranks that communicate alike."""
    lines = (line for program in programs for line in _lines(program.graph, group))
    text = "\n".join([*lines, *inside])
    return hashlib.sha256(text.encode()).hexdigest()


def _bodies(node: dict[str, Any]) -> Iterator[tuple[str, _C.Graph]]:
    """Give the graphs that an If or a Loop runs, with the names of the attributes they are in."""
    for name, value in node["attrs"].items():
        if isinstance(value, _C.Graph):
            yield name, value


def _group_names(graph: _C.Graph) -> Iterator[str]:
    for node in graph.nodes():
        if "group_name" in node["attrs"]:
            yield node["attrs"]["group_name"]
        for _, body in _bodies(node):
            yield from _group_names(body)


def _lines(graph: _C.Graph, group: str) -> Iterator[str]:
    """Describe the collectives of a graph among the ranks of a group, in their order."""
    types = graph.types()
    for node in graph.nodes():
        attributes = node["attrs"]
        for name, body in _bodies(node):
            inside = [*_lines(body, group)]
            if inside:
                yield from (f"{node['op']} {name}", *inside, "end")
        operator = attributes.get("operator", "")
        if not operator.startswith(COLLECTIVES) or attributes.get("group_name") != group:
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


def _refuse(group: Any, words: str) -> NoReturn:
    """Raise UserError, under every fallback policy."""
    with asked_for():
        raise _C.UserError(f"ranks of group '{group.group_name}': {words}")


def _tell_and_wait(group: Any, words: str) -> list[str]:
    """Tell the other ranks something; give what each has told."""
    number = _rounds[group] = _rounds.get(group, 0) + 1
    store = ranks.store_of(group)
    keys = [f"torch_ort/{number}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], words)
    timeout = ranks.timeout_of(group)
    try:
        store.wait(keys, timeout)
    except Exception:  # of a timeout, or because the rank that has the store is gone
        late = [rank for rank, key in enumerate(keys) if not _is_there(store, key)]
    else:
        return [store.get(key).decode() for key in keys]
    _refuse(
        group,
        f"rank {group.rank()} captures a graph that communicates, and rank "
        f"{', '.join(map(str, late))} does not within {timeout}; all ranks of a group must call "
        "the same compiled functions with the same sizes",
    )


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except Exception:  # the store is gone
        return False
