"""Training on several ranks: process group, averaged gradients, sharded optimizer state."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_ort.core.user_code import calling_line, warn_at

# The address if mpirun has started all ranks on one machine and nothing else is given, as with
# torchrun.
_LOCAL = "tcp://127.0.0.1:29500"


def spread(module: torch.nn.Module) -> torch.nn.Module:
    """Put DistributedDataParallel around a module where there are several ranks."""
    return DistributedDataParallel(module) if num_ranks() > 1 else module


def num_ranks() -> int:
    """Give the number of ranks of torch.distributed, 1 where there is no group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join(rank: int, world_size: int, device: torch.device) -> None:
    """See that torch.distributed has this many ranks, and that this is the given one.

    A group that is missing is made from the environment: that of torchrun (`MASTER_ADDR` and
    `MASTER_PORT`), or that of mpirun with all ranks on one machine.

    Raises ValueError for numbers that do not fit each other or a group that is there, RuntimeError
    where torch has no torch.distributed or the environment tells too little.
    """
    if world_size < 1:
        raise ValueError(f"world_size: got {world_size}, want at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"world_rank: got {rank}, want one of 0 to {world_size - 1}")
    if dist.is_available() and dist.is_initialized():
        there = (dist.get_rank(), dist.get_world_size())
        if there != (rank, world_size):
            raise ValueError(
                f"world_rank, world_size: got {rank}, {world_size}, want those of "
                f"torch.distributed, {there[0]}, {there[1]}"
            )
    elif world_size > 1:
        _make_group(rank, world_size, device)
    else:
        _warn_of_launcher()


def _make_group(rank: int, world_size: int, device: torch.device) -> None:
    # `python -m torch_ort.options` must be the first to import the module.
    from torch_ort.options import launched

    if not dist.is_available():
        raise RuntimeError(f"world_size: got {world_size}, but this torch has no torch.distributed")
    found = launched()
    if found.has_address:
        method = "env://"
    elif found.world_size == found.num_local == world_size:
        method = _LOCAL
    else:
        raise RuntimeError(
            f"world_size: got {world_size}, but neither a process group nor its address; start "
            f"with `torchrun --nproc-per-node {world_size} ...`, set MASTER_ADDR and MASTER_PORT, "
            "or call torch.distributed.init_process_group first"
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size)


def _warn_of_launcher() -> None:
    from torch_ort.options import launched

    found = launched()
    if found.world_size > 1:
        message = (
            f"world_size: got 1, but a launcher has started {found.world_size} ranks: each trains "
            f"alone; pass world_rank={found.rank}, world_size={found.world_size} to train together"
        )
        warn_at(calling_line(), message, UserWarning)


def sharded(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Make an optimizer of which each rank keeps and computes a part of the state (ZeRO stage 1).

    After each step every rank has all parameters. With one rank it is the optimizer itself.
    """
    if num_ranks() == 1:
        return kind(groups, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **settings)


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give the optimizer that updates on this rank: of a sharded one its part."""
    return getattr(optimizer, "optim", optimizer)
