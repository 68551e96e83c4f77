"""What the samplers share: the rank they serve, and lists divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")


def checked_ranks(world_size: int | None, rank: int | None) -> tuple[int, int]:
    """Give the number of ranks and this one, from torch.distributed where they are None.

    Raises RuntimeError if torch.distributed is missing or not initialized, ValueError for numbers
    that do not fit.
    """
    if world_size is None or rank is None:
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            reason = "not initialized" if distributed.is_available() else "not in this torch"
            raise RuntimeError(
                f"torch.distributed is {reason}, want it for the defaults of world_size and rank; "
                "call torch.distributed.init_process_group first, or pass both"
            )
        world_size = distributed.get_world_size() if world_size is None else world_size
        rank = distributed.get_rank() if rank is None else rank
    if world_size < 1:
        raise ValueError(f"world_size: got {world_size}, want at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: got {rank}, want one of 0 to {world_size - 1}")
    return world_size, rank


def generator_of(seed: int, epoch: int) -> torch.Generator:
    """Give the source of random numbers of an epoch, the same on all ranks."""
    return torch.Generator().manual_seed(seed + epoch)


def cut_into_chunks(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Cut a list into chunks of `size`; the last one goes on with the list's start."""
    if not items:
        return []
    length = -(-len(items) // size) * size
    wrapped = [items[i % len(items)] for i in range(length)]
    return [wrapped[start : start + size] for start in range(0, length, size)]


def drop_remainder(
    items: Sequence[Item], size: int, generator: torch.Generator | None
) -> list[Item]:
    """Leave out so many items that chunks of `size` come out even.

    They are neighbours, so that each chunk still is a stretch of the list: the last ones, or those
    after a number of chunks that `generator` draws.
    """
    remainder = len(items) % size
    start = len(items) - remainder
    if generator is not None and remainder:
        start = size * int(torch.randint(len(items) // size + 1, (), generator=generator))
    return [*items[:start], *items[start + remainder :]]
