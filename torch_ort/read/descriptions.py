"""Describes nodes of FX graphs: types of values, the user's line, the name of the operator."""

from __future__ import annotations

import functools
import re

import torch
from torch import fx

from torch_ort.core.user_code import Line, innermost
from torch_ort.rules.symbols import size


def type_of(value: torch.Tensor) -> tuple | None:
    """Describe a (fake) tensor: dtype, shape, strides, device; None if only a run can tell."""
    if value.layout != torch.strided or getattr(value, "is_quantized", False):
        return None
    return (
        str(value.dtype).removeprefix("torch."),
        [size(dim) for dim in value.shape],
        [size(stride) for stride in value.stride()],
        str(value.device),
    )


def origin_of(node: fx.Node) -> str:
    """Give the user's line that a node came from, as `file.py:12`."""
    return node.meta["origin"] if "origin" in node.meta else str(line_of(node) or "")


def line_of(node: fx.Node) -> Line | None:
    """Give the user's line that a node came from."""
    if "line" in node.meta:
        return node.meta["line"]
    return _line_of_trace(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=1024)  # nodes of one line have the same trace
def _line_of_trace(trace: str) -> Line | None:
    return innermost((path, int(number)) for path, number in _ENTRY.findall(trace))


def name_of(node: fx.Node) -> str:
    """Give the name of the operator or function that a node calls."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


_ENTRY = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
