"""A process group of two ranks, of which one is pretended, that does all its work when waited for.

It spoils results while they are in flight, and reads operands as they are when it is waited for, so
that whoever reads a result too early, or writes into an operand, gets other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# The other rank has the tensors of this one times that.
FACTOR = 2
NAME = "late"


def start(op: str, *args: object) -> torch.Tensor:
    """Start a collective of the group; give its result, which is in flight."""
    return getattr(torch.ops._c10d_functional, op)(*args, NAME)


def wait(x: torch.Tensor) -> torch.Tensor:
    """Wait for what is in flight."""
    return torch.ops._c10d_functional.wait_tensor(x)


def exchange(
    there: Callable[[torch.Tensor], torch.Tensor], back: Callable[[torch.Tensor], torch.Tensor]
) -> type[torch.autograd.Function]:
    """Give what communicates in forward in one way, and in backward in another."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return there(x)

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return back(gradient)

    return Exchange


class LateWork(dist.Work):
    def __init__(self, finish: Callable[[], None], group: LateGroup) -> None:
        super().__init__()
        self._finish, self._group = finish, group
        self._is_done = False
        group.log.append("start")

    def wait(self, timeout: Any = None) -> bool:
        if not self._is_done:
            self._group.log.append("wait")
            if self._group.fails:
                raise RuntimeError("the other rank has died")
            self._finish()
            self._is_done = True
        return True


class LateGroup(dist.ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.log: list[str] = []  # starts and waits
        self.fails = False

    def getBackendName(self) -> str:  # a name of PyTorch's
        return NAME

    def _later(self, results: list[torch.Tensor], compute: Callable[[], list]) -> LateWork:
        for each in results:
            each.fill_(torch.nan)

        def finish() -> None:
            for each, made in zip(results, compute(), strict=True):
                each.copy_(made)

        return LateWork(finish, self)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> LateWork:
        given = [each.clone() for each in tensors]
        return self._later(tensors, lambda: [each * (1 + FACTOR) for each in given])

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any = None) -> LateWork:
        return self.allreduce(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> LateWork:
        given = [each.clone() for each in tensors]
        return self._later(tensors, lambda: given)

    def _allgather_base(
        self, output: torch.Tensor, given: torch.Tensor, options: Any = None
    ) -> LateWork:
        return self._later([output], lambda: [torch.cat([given, given * FACTOR])])

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], options: Any = None
    ) -> LateWork:
        return self._later(
            outputs, lambda: [torch.cat([each, each * FACTOR]) for each in given]
        )  # fmt: skip

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, options: Any = None
    ) -> LateWork:
        return self._later([output], lambda: [given.chunk(2)[0] * (1 + FACTOR)])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], options: Any = None
    ) -> LateWork:
        return self._later(outputs, lambda: [each.chunk(2)[0] * (1 + FACTOR) for each in given])

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, to: Any, of: Any, options: Any = None
    ) -> LateWork:
        return self._later(
            [output], lambda: [torch.cat([given.chunk(2)[0], given.chunk(2)[0] * FACTOR])]
        )  # fmt: skip


@contextmanager
def late_group() -> Iterator[LateGroup]:
    """Give such a group that operators find by its name in the block."""
    group = LateGroup(0, 2)
    torch._C._distributed_c10d._register_process_group(NAME, group)
    try:
        yield group
    finally:
        torch._C._distributed_c10d._unregister_process_group(NAME)
