"""Samplers that give all ranks samples of about the same complexity at each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from torch_ort.onnxruntime_training.samplers.ranks import (
    checked_ranks,
    cut_into_chunks,
    drop_remainder,
    generator_of,
)

BatchFn = Callable[[list[int]], Sequence[Sequence[int]]]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Gives each rank its samples of a dataset; those of one step are about equally complex.

    The dataset is sorted by complexity (equal ones stay in the order of the dataset) and cut into
    chunks of `world_size` neighbours; in each step, rank r takes the r-th sample of a chunk. If the
    last chunk is not full, it is filled up from the start of the sorted list. The order depends on
    `seed` and the epoch alone, see `set_epoch`.

        sampler = LoadBalancingDistributedSampler(dataset, lambda sample: len(sample["ids"]))
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    Args:
        dataset: Has `__getitem__` and `__len__`.
        complexity_fn: Maps a sample to a number, such as its length. It is called once for each
            sample, when the order is needed for the first time.
        world_size: Number of ranks; that of torch.distributed if None.
        rank: This rank; that of torch.distributed if None.
        shuffle: Permute the chunks, or with `group_size` the groups; chunks keep their samples.
        group_size: Sort within groups of this many consecutive samples of the dataset, instead of
            all samples. If it is no multiple of `world_size`, some chunks span two groups.
        seed: Determines the permutation together with the epoch; must be the same on all ranks.
        drop_last: Leave out the samples that fill no whole chunk, instead of repeating others; with
            `shuffle` they differ from epoch to epoch.
        random_level: The noise added to complexities before sorting, anew in each epoch: random
            integers from 0 up to this fraction of their range. 0 balances best, 1 hardly at all.

    Raises ValueError for a rank, group size or level out of range, and for a complexity that is not
    a finite number; TypeError for a dataset that cannot be indexed; RuntimeError if `world_size` or
    `rank` is None and torch.distributed is not initialized.
    """

    def __init__(
        self,
        dataset: Dataset,
        complexity_fn: Callable[[Any], int],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset: got {type(dataset).__name__}, want one with __getitem__ and __len__"
            )
        self.world_size, self.rank = checked_ranks(world_size, rank)
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size: got {group_size}, want None or at least 1")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level: got {random_level}, want 0 to 1")
        self.dataset = dataset
        self.complexity_fn = complexity_fn
        self.shuffle = shuffle
        self.group_size = group_size
        self.seed = seed
        self.drop_last = drop_last
        self.random_level = random_level
        self.epoch = 0
        count = len(dataset)
        self.num_samples = count // self.world_size if drop_last else -(-count // self.world_size)
        self.total_size = self.num_samples * self.world_size
        self._complexities: torch.Tensor | None = None
        self._order: torch.Tensor | None = None  # fixed if there is no noise

    @property
    def complexities(self) -> list[int | float]:
        """The complexity of each sample, by its index in the dataset."""
        return self._known_complexities().tolist()

    def chunks(self) -> list[list[int]]:
        """Return the samples of this epoch: for each step one dataset index for each rank."""
        generator = generator_of(self.seed, self.epoch)
        order = self._sorted_places(generator)
        if self.shuffle and self.group_size is not None:
            groups = order.split(self.group_size)
            shuffled = torch.randperm(len(groups), generator=generator).tolist()
            order = torch.cat([groups[i] for i in shuffled]) if groups else order
        places = order.tolist()
        if self.drop_last:
            source = generator if self.shuffle else None
            places = drop_remainder(places, self.world_size, source)
        chunks = cut_into_chunks(places, self.world_size)
        if self.shuffle and self.group_size is None:
            shuffled = torch.randperm(len(chunks), generator=generator).tolist()
            chunks = [chunks[i] for i in shuffled]
        return chunks

    def _sorted_places(self, generator: torch.Generator) -> torch.Tensor:
        """Sort within the groups, with noise from the generator if there is any."""
        complexities = self._known_complexities()
        if not len(complexities):
            return torch.empty(0, dtype=torch.int64)
        spread = complexities.max().item() - complexities.min().item()
        noise = int(spread * self.random_level + 1)
        if noise > 1:
            noisy = complexities + torch.randint(noise, complexities.shape, generator=generator)
            return _sort_in_groups(noisy, self.group_size)
        if self._order is None:
            self._order = _sort_in_groups(complexities, self.group_size)
        return self._order

    def _known_complexities(self) -> torch.Tensor:
        if self._complexities is None:
            numbers = [
                _number(self.complexity_fn(self.dataset[place]), place)
                for place in range(len(self.dataset))
            ]
            is_whole = all(isinstance(number, int) for number in numbers)
            kind = torch.int64 if is_whole else torch.float64
            self._complexities = torch.tensor(numbers, dtype=kind)
        return self._complexities

    def __iter__(self) -> Iterator[int]:
        return iter([chunk[self.rank] for chunk in self.chunks()])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the permutation: on all ranks, before each epoch."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Groups the samples of a load balancing sampler into batches, the same number on all ranks.

    `batch_fn` gets the dataset indices of one rank in their order and returns its batches. Each
    process calls it for all ranks, so it must not depend on anything that differs between
    processes. A `TokenBudgetPacker` can serve as `batch_fn`.

    Args:
        sampler: With `drop_last=False`.
        batch_fn: Maps a list of dataset indices to a list of batches, which are lists of indices.
        drop_last: If ranks have different numbers of batches, drop those that exceed the smallest
            number. If False, ranks with fewer batches repeat their first ones.

    Raises ValueError for another kind of sampler, for one that drops samples itself, and where
    `batch_fn` gives one rank no batch to repeat.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: BatchFn,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(
                f"sampler: got {type(sampler).__name__}, want a LoadBalancingDistributedSampler"
            )
        if sampler.drop_last:
            raise ValueError(
                "sampler: got one with drop_last=True, want False; pass drop_last=True here instead"
            )
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self.world_size = sampler.world_size
        self.rank = sampler.rank
        self.generate_batches()

    def generate_batches(self) -> None:
        """Compute the batches of the sampler's epoch with `batch_fn`.

        Raises ValueError if `batch_fn` gives one rank no batch.
        """
        chunks = self.sampler.chunks()
        ranks = [
            [list(batch) for batch in self.batch_fn([chunk[rank] for chunk in chunks])]
            for rank in range(self.world_size)
        ]
        counts = [len(batches) for batches in ranks]
        self.total_batch = min(counts) if self.drop_last else max(counts)
        if self.total_batch and 0 in counts:
            raise ValueError(
                f"batch_fn: got no batch for rank {counts.index(0)} and {self.total_batch} for "
                "another, want at least one for each; drop_last=True drops those of the others"
            )
        # The batches of all ranks, since the number for a process depends on all of them.
        self.padded_batches = [
            [batches[i % len(batches)] for i in range(self.total_batch)] for batches in ranks
        ]
        self._epoch = self.sampler.epoch

    def _refresh(self) -> None:
        # Trainers set the epoch of the wrapped sampler.
        if self._epoch != self.sampler.epoch:
            self.generate_batches()

    def __iter__(self) -> Iterator[list[int]]:
        self._refresh()
        return iter([list(batch) for batch in self.padded_batches[self.rank]])

    def __len__(self) -> int:
        self._refresh()
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the permutation: on all ranks, before each epoch."""
        self.sampler.set_epoch(epoch)
        self.generate_batches()


def _sort_in_groups(complexities: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """Sort indices by ascending complexity, within groups of indices if `group_size` is given."""
    order = complexities.argsort(stable=True)
    if group_size is None:
        return order
    return order[(order // group_size).argsort(stable=True)]


def _number(value: Any, place: int) -> int | float:
    try:
        number = value.item() if isinstance(value, torch.Tensor) else value
        whole = math.floor(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(
            f"complexity_fn: got {value!r} for sample {place}, want a finite number"
        ) from None
    return whole if whole == number else float(number)
