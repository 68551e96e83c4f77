"""Writes PyTorch's symbolic sizes as text that the engine's expressions are parsed from."""

from __future__ import annotations

import re
from typing import Any

import sympy
import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.pytorch.size_compat import sympy_functions as torch_sympy

_INFIX = {
    sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">=",
}  # fmt: skip
_LARGEST = 2**63 - 1
_FLOOR_DIVISIONS = (torch_sympy.FloorDiv, torch_sympy.CleanDiv)
_REMAINDERS = (torch_sympy.Mod, torch_sympy.PythonMod, sympy.Mod)
_BEYOND_SIZES = re.compile(r"sizes: (got .*, want |what is done depends on )")


class Symbolic:
    """An integer or a truth over symbols, as an argument of a recorded call.

    fx takes neither SymInt nor SymBool there.
    """

    def __init__(self, size: torch.SymInt | torch.SymBool) -> None:
        self.size = size

    def __repr__(self) -> str:
        return str(self.size)


def expression_text(expr: sympy.Basic) -> str:
    """Print a sympy expression in the engine's grammar (+ - * // % ** min max and comparisons).

    Raises Unsupported on anything else.
    """
    if isinstance(expr, sympy.Integer | int):
        if not -_LARGEST <= int(expr) <= _LARGEST:
            raise Unsupported(f"symbolic size: got {expr}, want a number of 64 bits")
        return str(int(expr))
    if isinstance(expr, sympy.Symbol):
        return expr.name
    if expr is sympy.true or expr is sympy.false:
        return "1" if expr is sympy.true else "0"
    args = map(_within_64_bits, expr.args) if type(expr) in _INFIX else expr.args
    parts = [f"({expression_text(arg)})" for arg in args]
    if isinstance(expr, sympy.Add):
        return " + ".join(parts)
    if isinstance(expr, sympy.Mul):
        return " * ".join(parts)
    if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and expr.exp >= 0:
        return f"{parts[0]} ** {parts[1]}"
    if isinstance(expr, _FLOOR_DIVISIONS):
        return f"{parts[0]} // {parts[1]}"
    if isinstance(expr, torch_sympy.CeilToInt | torch_sympy.FloorToInt | torch_sympy.ToFloat):
        raise Unsupported(f"symbolic size: got {expr}, which is not an integer expression")
    if isinstance(expr, _REMAINDERS):
        return f"{parts[0]} % {parts[1]}"
    if isinstance(expr, sympy.Abs):
        return _nested("max", [parts[0], f"((-1) * {parts[0]})"])
    if isinstance(expr, torch_sympy.Max | sympy.Max):
        return _nested("max", parts)
    if isinstance(expr, torch_sympy.Min | sympy.Min):
        return _nested("min", parts)
    if type(expr) in _INFIX:
        return f"{parts[0]} {_INFIX[type(expr)]} {parts[1]}"
    if isinstance(expr, sympy.And):
        return " & ".join(parts)
    if isinstance(expr, sympy.Or):
        return " | ".join(parts)
    if isinstance(expr, sympy.Not):
        return f"!{parts[0]}"
    raise Unsupported(f"symbolic size: got {expr}, want + - * // % ** min max of integers")


def _within_64_bits(bound: sympy.Basic) -> sympy.Basic:
    """Give what a size is compared with; PyTorch's largest unsigned integer is beyond all sizes."""
    if not isinstance(bound, sympy.Integer):
        return bound
    return sympy.Integer(max(-_LARGEST, min(int(bound), _LARGEST)))


def _nested(name: str, parts: list[str]) -> str:
    text = parts[0]
    for part in parts[1:]:
        text = f"{name}({text}, {part})"
    return text


def size(value: int | torch.SymInt) -> int | str:
    """Give a size as an integer, or as the text of its expression. Never adds a guard."""
    if isinstance(value, torch.SymInt):
        recorded = _C.size_text(value)
        if recorded is not None:
            return recorded
        expr = value.node.expr
        return int(expr) if isinstance(expr, sympy.Integer) else expression_text(expr)
    return int(value)


def size_hint(value: torch.SymInt) -> int | None:
    """Give the value of a size in the call that is captured; None if there is none."""
    recorded = _C.size_value(value)
    return value.node.hint if recorded is None else recorded


def is_known_size(value: Any) -> bool:
    """Tell whether a value is an integer that sizes of inputs alone tell, and no data."""
    return type(value) is int or (isinstance(value, torch.SymInt) and size_hint(value) is not None)


def is_beyond_sizes(error: Exception) -> bool:
    """Tell whether a recording asked sizes for a value that they cannot express: a fraction.

    They say so with Unsupported, but PyTorch, which calls them, makes a RuntimeError of it: only
    the words are left.
    """
    return isinstance(error, RuntimeError) and _BEYOND_SIZES.match(str(error)) is not None


def symbol_name(value: torch.SymInt) -> str | None:
    """Give the name of a size that is a bare symbol, or None."""
    recorded = _C.size_text(value)
    if recorded is not None:
        return recorded if isinstance(recorded, str) and recorded.isidentifier() else None
    expr = value.node.expr
    return expr.name if isinstance(expr, sympy.Symbol) else None
