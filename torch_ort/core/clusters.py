"""Lists of operator sequences to recompute, by name: `<Op+Op+>:<type>:<count>`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

WANTED = (
    "want <Op+Op+>:<type>:<count>, with type 0, 1 or 2, and count -1 for all of them or the number "
    "of the first ones"
)
_ENTRY = re.compile(r"((?:[\w.]+\+)+):([012]):(-1|\d+)")


def check_clusters(value: Any) -> tuple[str, ...]:
    """Give the entries of a list, each cluster once: the last entry for it.

    `value` is the list, its text with commas between the entries, or the path of a JSON file that
    holds a list of strings. Raises ValueError for entries that are none, and for files that cannot
    be read or hold no list of strings; it names the file.
    """
    if isinstance(value, str) and _is_path(value):
        return _checked(_read(value), f"{value}: ")
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{WANTED}, in a list, in text with commas, or in a JSON file")
    return _checked(value, "")


def parse_cluster(entry: str) -> tuple[str, int, int]:
    """Give name, type and count of an entry. Raises ValueError if it is none."""
    match = _ENTRY.fullmatch(entry.strip())
    if match is None:
        raise ValueError(f"{WANTED}; {entry!r} is none")
    return match[1], int(match[2]), int(match[3])


def recomputes_by_name(options: Any) -> bool:
    """Tell whether options ask for layers or clusters to be made again."""
    return options.memory_opt_level > 0 or bool(options.memory_opt_config)


def check_probe_level(value: Any) -> str:
    """Take the level of a search, "0" or "1". Raises ValueError."""
    if value not in ("0", "1"):
        raise ValueError("want 0 or 1")
    return value


def check_probe_config(value: Any) -> str:
    """Take the level of a search, and whether it ends where a layer begins. Raises ValueError."""
    if not isinstance(value, str) or re.fullmatch(r"[01](:[01])?", value) is None:
        raise ValueError("want <level>:<whether layers are boundaries>, each 0 or 1")
    return value


def _is_path(text: str) -> bool:
    return text.endswith(".json") or os.path.isfile(text)


def _read(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a JSON list: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"{path}: want a JSON list of strings")
    return entries


def _checked(entries: Sequence[str], where: str) -> tuple[str, ...]:
    last = {}
    for entry in entries:
        try:
            name, *_ = parse_cluster(entry)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        last[name] = entry.strip()
    return tuple(last.values())
