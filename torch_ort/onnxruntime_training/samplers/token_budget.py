"""Batches of samples of similar length, with at most a given number of tokens after padding."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.utils.data import Sampler

from torch_ort.onnxruntime_training.samplers.ranks import (
    checked_ranks,
    cut_into_chunks,
    drop_remainder,
    generator_of,
)


class TokenBudgetPacker:
    """Packs samples into batches that have at most `max_tokens` tokens once they are padded.

    A batch is padded to its longest sample, rounded up to a multiple of `pad_to_multiple_of`; it
    has that many tokens times its number of samples. Samples are sorted by length (equal ones stay
    in their order) and cut where the budget ends: no other cuts of the sorted samples make fewer
    batches. Called with dataset indices, a packer returns lists of indices, in the order in which
    the first samples of the batches were given; so it can serve as a `batch_fn`.

    Args:
        lengths: The length of each sample in tokens, by its index in the dataset: a sequence of
            ints or a one-dimensional tensor, such as
            `LoadBalancingDistributedSampler.complexities`.
        max_tokens: The budget of a batch in tokens, padding included.
        max_samples: The largest number of samples in a batch; None: as many as fit.
        pad_to_multiple_of: The number to whose multiples the collator rounds padded lengths up.
        window: Sort this many samples at a time, alternately in ascending and descending order, so
            that another order of the samples makes other batches. None sorts all samples at once, 1
            sorts none.
        oversized: What to do with a sample that alone exceeds the budget: `"error"` raises
            ValueError, `"drop"` leaves it out.

    Raises ValueError for numbers below 1, for a negative length, and for samples over the budget.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        pad_to_multiple_of: int = 1,
        window: int | None = None,
        oversized: str = "error",
    ) -> None:
        _check_least("max_tokens", max_tokens)
        _check_least("pad_to_multiple_of", pad_to_multiple_of)
        for name, value in (("max_samples", max_samples), ("window", window)):
            if value is not None:
                _check_least(name, value)
        if oversized not in ("error", "drop"):
            raise ValueError(f"oversized: got {oversized!r}, want 'error' or 'drop'")
        self.lengths = _whole_numbers(lengths)
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self.pad_to_multiple_of = pad_to_multiple_of
        self.window = window
        self.oversized = [
            place for place in range(len(self.lengths)) if self.padded_tokens([place]) > max_tokens
        ]
        self._left_out = set(self.oversized)
        if oversized == "error" and self.oversized:
            raise ValueError(self._over_the_budget())

    def padded_tokens(self, batch: Sequence[int]) -> int:
        """Return the number of tokens of a batch of dataset indices, padding included."""
        longest = max((self.lengths[place] for place in batch), default=0)
        return len(batch) * self._padded(longest)

    def __call__(self, places: Iterable[int]) -> list[list[int]]:
        """Pack dataset indices into batches, in the order in which their first samples come."""
        places = list(places)
        position = {place: i for i, place in reversed(list(enumerate(places)))}
        return sorted(self.cut(places), key=lambda batch: min(position[it] for it in batch))

    def cut(self, places: Iterable[int]) -> list[list[int]]:
        """Pack dataset indices into batches, in the order of the cuts: from short to long."""
        batches: list[list[int]] = []
        longest = 0
        for place in self._sorted(list(places)):
            longest = max(longest, self.lengths[place])
            if not batches or not self._fits(len(batches[-1]) + 1, longest):
                batches.append([])
                longest = self.lengths[place]
            batches[-1].append(place)
        return batches

    def _sorted(self, places: list[int]) -> Iterator[int]:
        kept = [place for place in places if place not in self._left_out]
        window = self.window or max(len(kept), 1)
        for turn, start in enumerate(range(0, len(kept), window)):
            part = kept[start : start + window]
            # Ascending and descending in turn, so that lengths are similar where one window follows
            # another.
            yield from sorted(part, key=self.lengths.__getitem__, reverse=bool(turn % 2))

    def _fits(self, count: int, longest: int) -> bool:
        is_few = self.max_samples is None or count <= self.max_samples
        return is_few and count * self._padded(longest) <= self.max_tokens

    def _padded(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _over_the_budget(self) -> str:
        first = self.oversized[0]
        others = len(self.oversized) - 1
        more = f", and {others} more" if others else ""
        return (
            f"sample {first} has {self.padded_tokens([first])} tokens alone{more}, "
            f"want at most max_tokens={self.max_tokens}; shorten what is longer, "
            "raise max_tokens, or pass oversized='drop'"
        )


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Gives each rank batches within a token budget: the same number, of about equal padded length.

    The batches of a `TokenBudgetPacker` are sorted by the length that they are padded to, and in
    each step every rank gets one of `world_size` neighbours. If their number is no multiple of
    `world_size`, the batches with the most samples are halved, so that each sample is seen once in
    an epoch. Batches are repeated only if there are too few samples for that. The order depends on
    `seed` and the epoch alone, see `set_epoch`.

        packer = TokenBudgetPacker(lengths, max_tokens=8192)
        loader = DataLoader(dataset, batch_sampler=TokenBudgetBatchSampler(packer))

    Args:
        packer: A packer whose `lengths` are those of the dataset.
        world_size: Number of ranks; that of torch.distributed if None.
        rank: This rank; that of torch.distributed if None.
        shuffle: Permute the steps, and the samples of one length among each other; those of
            different lengths too where the packer has a `window`.
        seed: Determines the permutations together with the epoch; must be the same on all ranks.
        drop_last: Leave batches out instead of halving some; with `shuffle` they differ from epoch
            to epoch.

    Raises TypeError for another kind of packer, and what `LoadBalancingDistributedSampler` raises
    for `world_size` and `rank`.
    """

    def __init__(
        self,
        packer: TokenBudgetPacker,
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(packer, TokenBudgetPacker):
            raise TypeError(f"packer: got {type(packer).__name__}, want a TokenBudgetPacker")
        self.packer = packer
        self.world_size, self.rank = checked_ranks(world_size, rank)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._steps: list[list[list[int]]] = []
        self._known_epoch: int | None = None

    def steps(self) -> list[list[list[int]]]:
        """Return this epoch's batches: for each step one batch for each rank."""
        if self._known_epoch != self.epoch:
            self._steps = self._make_steps()
            self._known_epoch = self.epoch
        return self._steps

    def _make_steps(self) -> list[list[list[int]]]:
        generator = generator_of(self.seed, self.epoch)
        count = len(self.packer.lengths)
        places = (
            torch.randperm(count, generator=generator).tolist() if self.shuffle else range(count)
        )
        batches = self.packer.cut(places)
        if not self.drop_last:
            batches = _halve_the_largest(batches, -len(batches) % self.world_size)
        batches.sort(key=lambda it: (self.packer.padded_tokens(it) // len(it), len(it)))
        if self.drop_last:
            batches = drop_remainder(batches, self.world_size, generator if self.shuffle else None)
        steps = cut_into_chunks(batches, self.world_size)
        if self.shuffle:
            steps = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
        return steps

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(step[self.rank]) for step in self.steps()])

    def __len__(self) -> int:
        return len(self.steps())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the permutations: on all ranks, before each epoch."""
        self.epoch = epoch


def _halve_the_largest(batches: list[list[int]], times: int) -> list[list[int]]:
    """Cut the batches with the most samples in two until there are `times` more, if they can be."""
    numbers = itertools.count()
    parts = [(-len(batch), next(numbers), batch) for batch in batches]
    heapq.heapify(parts)
    for _ in range(times):
        if not parts or len(parts[0][2]) < 2:
            break
        _, _, batch = heapq.heappop(parts)
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            heapq.heappush(parts, (-len(half), next(numbers), half))
    return [batch for _, _, batch in parts]


def _whole_numbers(lengths: Sequence[int] | torch.Tensor) -> list[int]:
    values = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
    numbers = []
    for place, value in enumerate(values):
        try:
            numbers.append(operator.index(value))
        except TypeError:
            raise TypeError(f"lengths: got {value!r} for sample {place}, want an int") from None
        if numbers[-1] < 0:
            raise ValueError(f"lengths: got {value} for sample {place}, want at least 0")
    return numbers


def _check_least(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: got {value}, want at least 1")
