"""Private names of torch for symbolic sizes: those of Dynamo's graphs and of traces.

Each has a test in tests/pytorch/test_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch

from torch_ort import _C
from torch_ort.pytorch.private import PythonPrinter, ShapeEnv, TracingContext, symbolic_shapes
from torch_ort.pytorch.private import functions as sympy_functions

NodeOfSizes = torch._C._SymNode  # of a torch.SymInt, SymFloat or SymBool, implemented in C++


class DynamoSymbol(NamedTuple):
    """A symbol of Dynamo's. It guards the bounds; None: there is none."""

    integer: torch.SymInt
    value: int | None  # in the call that is compiled; None if it is data-dependent
    low: int | None
    high: int | None


def values_in(env: Any) -> dict[sympy.Symbol, Any]:
    """Give the values that symbols have in the call that is traced; torch has renamed them."""
    values = getattr(env, "backed_var_to_val", None)
    return env.var_to_val if values is None else values


def dynamo_symbols(size: torch.SymInt) -> dict[str, DynamoSymbol]:
    """Give the symbols in a size, by name."""
    env = size.node.shape_env
    values = values_in(env)
    found = {}
    for symbol in size.node.expr.free_symbols:
        value = int(values[symbol]) if symbol in values else None
        bounds = env.var_to_range[symbol]
        low, high = (
            int(bound) if isinstance(bound, sympy.Integer) else None
            for bound in (bounds.lower, bounds.upper)
        )
        integer = env.create_symintnode(symbol, hint=value)
        found[symbol.name] = DynamoSymbol(integer, value, low, high)
    return found


def hint_of(number: torch.SymInt | torch.SymFloat) -> Any:
    """Give the value of a number of Dynamo's in the call that is compiled."""
    return number.node.hint


def is_known(condition: bool | torch.SymBool) -> bool:
    """Tell whether a condition of Dynamo's sizes holds for all that it lets pass."""
    return bool(symbolic_shapes.statically_known_true(condition))


def fixes_a_size(condition: torch.SymBool) -> bool:
    """Tell whether a condition on Dynamo's sizes allows but one value of a size."""
    expr = condition.node.expr
    if not isinstance(expr, sympy.Eq) or expr.has(*_REMAINDERS):
        return False
    return any(side.is_number for side in expr.args)


_REMAINDERS = (sympy_functions.Mod, sympy_functions.PythonMod)


_dynamo_sizes: weakref.WeakSet[ShapeEnv] = weakref.WeakSet()


def remember_dynamo_sizes() -> None:
    """Note the symbols of the graph that Dynamo compiles in this thread."""
    context = TracingContext.try_get()
    if context and context.fake_mode and context.fake_mode.shape_env:
        _dynamo_sizes.add(context.fake_mode.shape_env)


def forget_dynamo_sizes() -> None:
    """Let go of the symbols of graphs whose code Dynamo has dropped.

    A ShapeEnv lists the fakes of its capture. These hold its symbols, and so the ShapeEnv, from
    C++, where the garbage collector does not see it.
    """
    for sizes in _dynamo_sizes:
        sizes.tracked_fakes = None
    _dynamo_sizes.clear()
    forget_sizes()


def forget_sizes() -> None:
    """Let go of symbols that PyTorch has looked at.

    Caches of the methods of ShapeEnv hold it, and all fakes of its capture, for good.
    """
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def sizes_of_data(tensors: Sequence[torch.Tensor]) -> set[sympy.Symbol]:
    """Give the symbols of sizes that are only known from data."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    return symbolic_shapes.free_unbacked_symbols(sizes)


class Settings:
    """Numbers for symbolic sizes: those of the example, then others."""

    count = 4

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.open_sizes = [size for size in sizes if isinstance(size, torch.SymInt)]
        symbols = {s: number for size in self.open_sizes for s, number in _symbols_in(size).items()}
        if not symbols:
            self.count = 1
        self._numbers: list[dict[Any, int]] = [{} for _ in range(self.count)]
        for i, symbol in enumerate(sorted(symbols, key=str)):
            number = symbols[symbol]
            for numbers, other in zip(
                self._numbers, (number, number + 1 + i, 2 * number, number + 1), strict=False
            ):
                numbers[symbol] = other

    def at(self, size: Any, number: int) -> int:
        """Give a size in one of the settings."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        if _C.size_text(size) is not None:
            return _C.evaluate_size(size, self._numbers[number])
        return int(size.node.expr.subs(self._numbers[number]))


def _symbols_in(size: torch.SymInt) -> dict[Any, int]:
    """Give the symbols of a size, each with its value in the call that is traced."""
    recorded = _C.symbols_in_size(size)
    if recorded is not None:
        return recorded
    env = size.node.shape_env
    values = values_in(env)
    # 4 is an example of a data-dependent size.
    return {s: int(values.get(s, 4)) for s in size.node.expr.free_symbols}


def python_text(expr: sympy.Basic) -> str:
    """Print an expression over symbols as Python."""
    return PythonPrinter().doprint(expr)
