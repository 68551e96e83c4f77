"""The types of what functions give, which the engine asks for while it reads a file.

A function is run on the meta device, where tensors have sizes and no data. Sizes that only a call
knows are tried with two sets of numbers: a size of a result that is equal to one of an input both
times is that one, and one that is the same number both times is that number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort.onnx.functions.table import TABLE, Row

# An integer, ("symbol", name), or (operation, dim, dim): csrc/python/plain.h.
Dim = int | tuple[Any, ...]


def size_quotient(size: Any, divisor: Any) -> Any:
    """Divide a size and round down. Raises UserError for a division by 0: a file may ask for it."""
    check_divisor(divisor)
    return size // divisor


def size_remainder(size: Any, divisor: Any) -> Any:
    """Give what is left of that division. Raises UserError as above."""
    check_divisor(divisor)
    return size % divisor


def check_divisor(divisor: Any) -> None:
    """Raise UserError for 0."""
    if divisor == 0:
        raise _C.UserError("a size of the model: got a division by 0")


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": size_quotient,
    "mod": size_remainder,
    "pow": operator.pow,
    "min": torch.sym_min,
    "max": torch.sym_max,
}

# The domain of nodes that are functions, before that of the operator: csrc/ops/function.h.
FUNCTION_DOMAIN = "torch_ort.onnx"


def row_of(domain: str, name: str) -> tuple[str, Row]:
    """Give the name of an operator, and its row, by the domain of a node that is a function.

    Raises Unsupported if no function has the name.
    """
    of_operator = domain.removeprefix(FUNCTION_DOMAIN).removeprefix(".")
    words = f"{of_operator}.{name}" if of_operator else name
    if (of_operator, name) not in TABLE:
        raise _C.Unsupported(f"{words}: no function of PyTorch's computes it")
    return words, TABLE[of_operator, name]


def named_arguments(
    words: str, row: Row, attributes: Mapping[str, Any], wanted: Sequence[bool]
) -> dict[str, Any]:
    """Give what a function takes by name. Raises Unsupported for an attribute that it lacks."""
    named: dict[str, Any] = {}
    for name, given in attributes.items():
        if name.startswith("torch_ort."):
            continue
        if name not in row.attributes:
            raise _C.Unsupported(f"{words}: attribute '{name}' is not supported")
        named[name] = tuple(given) if isinstance(given, list) else given
    if row.takes("wanted"):
        named["wanted"] = tuple(wanted)
    if row.takes("opset"):
        named["opset"] = attributes["torch_ort.opset"]
    return named


def types_of(
    domain: str, name: str, inputs: Sequence[Any], attributes: Mapping[str, Any],
    wanted: Sequence[bool],
) -> list[tuple[str, list[Dim | None]] | None]:  # fmt: skip
    """Give dtypes and sizes of the outputs of a node; None for a size that only a call tells.

    `inputs` has (dtype, sizes) for a tensor, a list of numbers or sizes where the function takes
    such, and None where there is none. Raises UserError if the function does not take them.
    """
    words, row = row_of(domain, name)
    row.check_inputs(words, inputs)
    named = named_arguments(words, row, attributes, wanted)
    symbols = sorted(set(_symbols(inputs)))
    error: Exception | None = None
    for values in _trials(symbols):
        try:
            results = [_run(row, inputs, named, each) for each in values]
        except _C.Error:
            raise
        except Exception as raised:
            error = error or raised
            continue
        known = [list(_dims(inputs, each)) for each in values]
        return [_type(words, results, known, slot) for slot in range(len(wanted))]
    first = next(iter(str(error).splitlines()), type(error).__name__)  # the rest is of C++
    raise _C.UserError(f"{words}: {first}") from error


def _symbols(given: Any) -> Iterator[str]:
    if isinstance(given, tuple) and len(given) == 2 and given[0] == "symbol":
        yield given[1]
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _symbols(each)


def _trials(symbols: Sequence[str]) -> Iterator[list[dict[str, int]]]:
    """Give pairs of values for symbols: all different ones, and all equal ones.

    They have many divisors, and are above the sizes of what usually slides along them.
    """
    if not symbols:
        yield [{}]
        return
    for step in (48, 0):
        yield [
            {symbol: first + step * i for i, symbol in enumerate(symbols)}
            for first in (240, 240 + 48 * (len(symbols) + 1))
        ]


def _number(dim: Any, values: Mapping[str, int]) -> Any:
    if not isinstance(dim, tuple):
        return dim
    if dim[0] == "symbol":
        return values[dim[1]]
    return OPERATIONS[dim[0]](_number(dim[1], values), _number(dim[2], values))


def _run(
    row: Row, inputs: Sequence[Any], named: Mapping[str, Any], values: Mapping[str, int]
) -> list[tuple[torch.dtype, list[Any]] | None]:
    arguments: list[Any] = []
    for given in inputs:
        if isinstance(given, tuple):
            dtype, sizes = given
            arguments.append(
                torch.empty(
                    [_number(dim, values) for dim in sizes], dtype=getattr(torch, dtype),
                    device="meta",
                )
            )  # fmt: skip
        else:
            arguments.append(given and [_number(each, values) for each in given])
    with torch.no_grad():
        if row.types is not None:
            return list(row.types(*arguments, **named))
        if row.is_module:
            results = row.module(arguments, named).to("meta").eval()(*arguments)
        else:
            results = row.function(*arguments, **named)
    if not isinstance(results, tuple):
        results = (results,)
    return [None if each is None else (each.dtype, list(each.shape)) for each in results]


def _dims(inputs: Sequence[Any], values: Mapping[str, int]) -> Iterator[tuple[int, Dim]]:
    """Give the sizes of inputs with symbols in them, and their numbers."""
    for given in inputs:
        for dim in given[1] if isinstance(given, tuple) else given or []:
            if isinstance(dim, tuple):
                yield _number(dim, values), dim


def _type(
    words: str, results: Sequence[list], known: Sequence[list[tuple[int, Dim]]], slot: int
) -> tuple[str, list[Dim | None]] | None:
    if slot >= len(results[0]):
        raise _C.UserError(f"{words}: outputs: got {slot + 1}, want at most {len(results[0])}")
    if results[0][slot] is None:
        return None
    dtype = results[0][slot][0]
    dims = [_dim(sizes, known) for sizes in zip(*(each[slot][1] for each in results), strict=True)]
    return str(dtype).removeprefix("torch."), dims


def _dim(sizes: Sequence[Any], known: Sequence[list[tuple[int, Dim]]]) -> Dim | None:
    """Give the size of a result from what it was in each trial."""
    if None in sizes:
        return None
    matching = {
        pairs[0][1]
        for pairs in zip(*known, strict=True)
        if all(pair[0] == size for pair, size in zip(pairs, sizes, strict=True))
    }
    if matching:
        return min(matching, key=str) if len(matching) == 1 else None
    return sizes[0] if len(set(sizes)) == 1 else None
