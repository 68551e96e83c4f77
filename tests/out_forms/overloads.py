"""The `out=` overloads that a graph may use, each with the functional overload that it serves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

KEYS = {"cpu": "CPU", "cuda": "CUDA"}


@dataclass(frozen=True)
class Pair:
    """A functional overload, and the one that takes the same arguments and then the results."""

    functional: OpOverload
    out: OpOverload
    names: tuple[str, ...] = field(compare=False)  # of the out arguments, one for each result

    @property
    def name(self) -> str:
        """Give the name under which the list of proved overloads has it."""
        return self.out.name()

    @property
    def is_pointwise(self) -> bool:
        """Tell whether PyTorch says so of either."""
        return any(torch.Tag.pointwise in op.tags for op in (self.functional, self.out))

    @property
    def is_random(self) -> bool:
        """Tell whether it draws numbers."""
        tag = torch.Tag.nondeterministic_seeded
        return any(tag in op.tags for op in (self.functional, self.out))


def _is_out_of(functional: Any, out: Any) -> bool:
    plain, given = functional.arguments, out.arguments
    rest = given[len(plain) :]
    return (
        len(rest) == len(functional.returns)
        and all(a.is_out and str(a.type) == "Tensor" for a in rest)
        and all(
            a.name == b.name and str(a.type) == str(b.type)
            for a, b in zip(plain, given, strict=False)
        )
    )


def _makes_tensors(schema: Any) -> bool:
    is_functional = not any(a.is_out for a in schema.arguments)
    return (
        is_functional
        and bool(schema.returns)
        and all(str(result.type) == "Tensor" for result in schema.returns)
    )


def _has_kernel(op: OpOverload, device: str) -> bool:
    """Tell whether it has a kernel that writes: a generated one calls the functional form."""
    keys = (KEYS[device], "CompositeExplicitAutograd")
    return torch.Tag.generated not in op.tags and any(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys
    )


@cache
def pairs(device: str) -> dict[OpOverload, Pair]:
    """Give all pairs by functional overload, as `find_out_form` of csrc/run/ sees them."""
    by_operator: dict[str, list[OpOverload]] = defaultdict(list)
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        operator, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(torch.ops.aten, operator):
            continue
        packet = getattr(torch.ops.aten, operator)
        if (overload or "default") in packet.overloads():
            by_operator[operator].append(getattr(packet, overload or "default"))
    found = {}
    for overloads in by_operator.values():
        for functional in overloads:
            if not _makes_tensors(functional._schema):
                continue
            for out in overloads:
                if _is_out_of(functional._schema, out._schema) and _has_kernel(out, device):
                    names = tuple(a.name for a in out._schema.arguments if a.is_out)
                    found[functional] = Pair(functional, out, names)
                    break
    return found


@cache
def pairs_by_out(device: str) -> dict[OpOverload, Pair]:
    """Give the same pairs by their other half."""
    return {pair.out: pair for pair in pairs(device).values()}
