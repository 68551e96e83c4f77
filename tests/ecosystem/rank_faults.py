# What each rank of test_rank_faults.py does: a part of it goes wrong on one rank alone.
from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_ort
import torch_ort.parallel
from torch_ort import _C
from torch_ort.fallback import FallbackWarning


def fail_at(place: str) -> None:
    """Let the engine fail where it passes a place (csrc/base/failpoint.h)."""

    def fail(passed: str) -> None:
        if passed == place:
            raise _C.InternalError(f"failed at {place}")

    _C.set_failpoint(fail)


def total(x: Tensor) -> Tensor:
    group = dist.group.WORLD.group_name
    flying = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    return torch.ops._c10d_functional.wait_tensor(flying)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, backend="ort", fullgraph=True)


def one_cannot_capture(rank: int) -> Tensor:
    call = compiled(lambda x: total(x * 2).exp())
    if rank == 1:
        fail_at("remove_dead")
    try:
        return call(torch.full((4,), float(rank)))
    finally:
        _C.set_failpoint(None)


def one_module_cannot_be_captured(rank: int) -> Tensor:
    net = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(net.weight)
    module = torch_ort.ORTModule(torch_ort.parallel.replicate(net))
    if rank == 1:
        fail_at("remove_dead")
    try:
        module(torch.full((1, 4), float(rank))).sum().backward()
    finally:
        _C.set_failpoint(None)
    return next(net.parameters()).grad


class Total(torch.nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = total(x)
        return x


def modules_are_captured_differently(rank: int) -> Tensor:
    return torch_ort.ORTModule(Total(1 + rank))(torch.ones(4))


def a_module_fails_on_one(rank: int) -> Tensor:
    module = torch_ort.ORTModule(Total(1))
    if rank == 1:
        fail_at("wait")
    try:
        return module(torch.ones(4))
    finally:
        _C.set_failpoint(None)


def branches_communicate_differently(rank: int) -> Tensor:
    def other(x: Tensor) -> Tensor:
        return total(total(x)) if rank == 1 else total(x).exp()

    return compiled(lambda x: torch.cond(x.sum() > 0, total, other, (x,)))(torch.ones(4))


def captured_differently(rank: int) -> Tensor:
    def function(x: Tensor) -> Tensor:
        return total(total(x)) if rank == 1 else total(x).exp()

    return compiled(function)(torch.ones(4))


def one_captures_again(rank: int) -> Tensor:
    call = compiled(lambda x, scale: total(x * scale.to(x.dtype)))
    # Another dtype of what is not communicated: the collectives are those of before.
    scales = [torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64 if rank else torch.float32)]
    return torch.stack([call(torch.ones(4), scale) for scale in scales])


def one_captures_alone(rank: int) -> Tensor:
    call = compiled(lambda x: total(x))
    call(torch.ones(4))
    if rank == 0:
        return torch.zeros(1)
    return call(torch.ones(5))


def one_dies(rank: int) -> Tensor:
    call = compiled(lambda x: total(x * 2))
    call(torch.ones(4))
    if rank == 1:
        os._exit(0)
    return call(torch.ones(4))


def backward_fails_on_one(rank: int) -> Tensor:
    x = torch.ones(4, requires_grad=True)
    y = compiled(lambda x: (total(x.detach()) * x).exp())(x)
    if rank == 1:
        fail_at("region")
    try:
        y.sum().backward()
    finally:
        _C.set_failpoint(None)
    return x.grad


FAULTS = {
    each.__name__: each
    for each in (
        one_cannot_capture, captured_differently, one_captures_again, one_captures_alone, one_dies,
        backward_fails_on_one, one_module_cannot_be_captured, modules_are_captured_differently,
        a_module_fails_on_one, branches_communicate_differently,
    )
}  # fmt: skip


def main() -> None:
    rank, folder, ranks, name = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    store = dist.FileStore(str(folder / "store"), int(ranks))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=int(ranks), timeout=timedelta(seconds=10)
    )
    found: dict[str, Any] = {"error": "", "kind": "", "result": None}
    if name == "one_dies" and rank == 1:
        torch.save(found, folder / "rank_1.pt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found["result"] = FAULTS[name](rank)
        except Exception as error:
            found |= {"error": str(error), "kind": type(error).__name__}
    found["warnings"] = [
        str(each.message) for each in caught if issubclass(each.category, FallbackWarning)
    ]
    found["counters"] = dict(torch_ort.counters())
    torch.save(found, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    main()
