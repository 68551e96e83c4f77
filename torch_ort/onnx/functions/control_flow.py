"""Branches and loops of a file, whose bodies are modules.

What they decide depends on numbers in tensors, so Dynamo ends a graph there and begins another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Body = Callable[..., Any]


def integer(x: Tensor) -> int:
    """Read a tensor of one integer that is a size."""
    return int(x)


def if_else(
    condition: Tensor, then_branch: Body, else_branch: Body, then_symbols: Sequence[Any],
    else_symbols: Sequence[Any], operands: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run one of two bodies on its symbols and on the operands, which are those of both."""
    if bool(condition):
        return then_branch(*then_symbols, *operands)
    return else_branch(*else_symbols, *operands)


def loop(
    trip_count: Tensor | None, condition: Tensor | None, body: Body, symbols: Sequence[Any],
    carried: Sequence[Tensor], outer: Sequence[Tensor], scanned: Sequence[tuple[str, list[int]]],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a body as often as a number says, and as long as its condition holds (ONNX, Loop).

    The body takes symbols, the number of the round, the condition, what rounds carry on, and outer
    values. It gives the condition, what is carried on, and values that are stacked over the rounds:
    those of `scanned`, with dtype and sizes, which an empty stack has.
    """
    device = next((each.device for each in (*carried, *outer)), torch.device("cpu"))
    holds = torch.ones((), dtype=torch.bool, device=device) if condition is None else condition
    most = None if trip_count is None else int(trip_count)
    stacks: list[list[Tensor]] = [[] for _ in scanned]
    state = tuple(carried)
    count = 0
    while (most is None or count < most) and bool(holds):
        number = torch.full((), count, dtype=torch.int64, device=device)
        holds, *rest = body(*symbols, number, holds, *state, *outer)
        state = tuple(rest[: len(state)])
        for stack, each in zip(stacks, rest[len(state) :], strict=True):
            stack.append(each)
        count += 1
    results = [
        torch.stack(stack) if stack
        else torch.empty(0, *sizes, dtype=getattr(torch, dtype), device=device)
        for stack, (dtype, sizes) in zip(stacks, scanned, strict=True)
    ]  # fmt: skip
    return (*state, *results)
