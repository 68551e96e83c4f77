"""The load balancing samplers: what holds for all datasets, numbers of ranks and seeds."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from torch_ort.utils.data import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

pytestmark = pytest.mark.ort_only

COMPLEXITIES = st.lists(st.integers(-5, 12), max_size=40)
WORLD_SIZES = st.integers(1, 6)
GROUP_SIZES = st.none() | st.integers(1, 9)
EPOCHS = st.integers(0, 3)


class Numbers:
    """A dataset of numbers that counts how often each is read."""

    def __init__(self, numbers):
        self.numbers = list(numbers)
        self.reads = Counter()

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, place):
        self.reads[place] += 1
        return self.numbers[place]


def itself(sample):
    return sample


def samplers(numbers, world_size, **settings):
    return [
        LoadBalancingDistributedSampler(Numbers(numbers), itself, world_size, rank, **settings)
        for rank in range(world_size)
    ]


def steps_of(numbers, world_size, epoch=0, **settings):
    """Give what all ranks get at each step."""
    of_ranks = samplers(numbers, world_size, **settings)
    for sampler in of_ranks:
        sampler.set_epoch(epoch)
    lists = [list(sampler) for sampler in of_ranks]
    assert [len(sampler) for sampler in of_ranks] == [len(places) for places in lists]
    return list(zip(*lists, strict=True))


def stable_order(numbers):
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def wraps(step, order, world_size):
    """Tell whether a step is the end of the sorted list, gone on with from the start."""
    start = len(order) - len(order) % world_size
    return list(step) == [order[i % len(order)] for i in range(start, start + world_size)]


@given(COMPLEXITIES, WORLD_SIZES, GROUP_SIZES, EPOCHS, st.booleans(), st.floats(0, 1))
def test_the_ranks_share_out_the_dataset(numbers, world, group, epoch, shuffle, level):
    steps = steps_of(numbers, world, epoch, shuffle=shuffle, group_size=group, random_level=level)
    assert len(steps) == math.ceil(len(numbers) / world)
    counts = Counter(place for step in steps for place in step)
    assert counts.keys() == set(range(len(numbers)))
    assert counts.total() == len(steps) * world
    if len(numbers) >= world:
        repeated = sorted(place for place, count in counts.items() for _ in range(count - 1))
        assert len(repeated) == -len(numbers) % world
        assert len(set(repeated)) == len(repeated)


@given(COMPLEXITIES, WORLD_SIZES, GROUP_SIZES, EPOCHS, st.booleans(), st.floats(0, 1))
def test_nothing_is_repeated_where_the_rest_is_dropped(
    numbers, world, group, epoch, shuffle, level
):
    steps = steps_of(
        numbers, world, epoch,
        shuffle=shuffle, group_size=group, random_level=level, drop_last=True,
    )  # fmt: skip
    assert len(steps) == len(numbers) // world
    places = [place for step in steps for place in step]
    assert len(set(places)) == len(places)


@given(COMPLEXITIES, WORLD_SIZES, EPOCHS, st.booleans(), st.booleans())
def test_ranks_get_neighbours_of_the_sorted_dataset(numbers, world, epoch, shuffle, drop_last):
    order = stable_order(numbers)
    steps = steps_of(numbers, world, epoch, shuffle=shuffle, drop_last=drop_last)
    runs = [tuple(order[i : i + world]) for i in range(len(order) - world + 1)]
    for step in steps:
        assert step in runs or (not drop_last and wraps(step, order, world))
    if not shuffle:
        assert [place for step in steps for place in step][: len(order)] == order[
            : len(steps) * world
        ]


@given(COMPLEXITIES, st.integers(1, 4), st.integers(1, 3), EPOCHS, st.booleans())
def test_groups_are_sorted_and_stay_together(numbers, world, times, epoch, shuffle):
    # Groups of whole steps: none of them lies in two groups.
    size = world * times
    assume(len(numbers) % size == 0)
    steps = steps_of(numbers, world, epoch, shuffle=shuffle, group_size=size)
    places = [place for step in steps for place in step]
    groups = [places[start : start + size] for start in range(0, len(places), size)]
    for group in groups:
        first = min(group)
        assert first % size == 0
        assert group == sorted(range(first, first + size), key=numbers.__getitem__)
    if not shuffle:
        assert [min(group) for group in groups] == list(range(0, len(numbers), size))


@given(COMPLEXITIES, WORLD_SIZES, GROUP_SIZES, st.floats(0, 1), st.integers(0, 2**40), EPOCHS)
def test_seed_and_epoch_alone_decide(numbers, world, group, level, seed, epoch):
    settings = {"group_size": group, "random_level": level, "seed": seed}
    torch.manual_seed(1)
    first = steps_of(numbers, world, epoch, **settings)
    torch.manual_seed(2)
    assert steps_of(numbers, world, epoch, **settings) == first
    # An epoch that went before leaves nothing behind.
    (sampler,) = samplers(numbers, 1, **settings)
    orders = {}
    for e in (epoch, epoch + 1, epoch):
        sampler.set_epoch(e)
        orders.setdefault(e, list(sampler))
        assert list(sampler) == orders[e]


def test_epochs_and_seeds_differ():
    numbers = list(range(100))
    zero = steps_of(numbers, 2)
    assert steps_of(numbers, 2, 1) != zero
    assert steps_of(numbers, 2, seed=1) != zero
    assert steps_of(numbers, 2, seed=1) == steps_of(numbers, 2, 1)
    assert steps_of(numbers, 2, 1, group_size=10) != steps_of(numbers, 2, group_size=10)
    assert steps_of(numbers, 2, 1, shuffle=False) == steps_of(numbers, 2, shuffle=False)


def test_ties_keep_the_order_of_the_dataset():
    numbers = [i % 2 for i in range(1000)]
    steps = steps_of(numbers, 1, shuffle=False)
    assert [place for (place,) in steps] == [*range(0, 1000, 2), *range(1, 1000, 2)]


def test_shuffled_groups_are_those_that_were_sorted():
    numbers = [5, 4, 3, 2, 1, 0]
    steps = steps_of(numbers, 1, group_size=3)
    assert [place for (place,) in steps] in ([2, 1, 0, 5, 4, 3], [5, 4, 3, 2, 1, 0])
    seen = {tuple(steps_of(numbers, 1, epoch, group_size=3)) for epoch in range(20)}
    assert len(seen) == 2


def test_other_samples_are_dropped_in_other_epochs():
    numbers = list(range(11))

    def dropped(epoch, **settings):
        steps = steps_of(numbers, 4, epoch, drop_last=True, **settings)
        return frozenset(range(11)) - {place for step in steps for place in step}

    assert {dropped(epoch, shuffle=False) for epoch in range(40)} == {frozenset({8, 9, 10})}
    assert {dropped(epoch) for epoch in range(40)} == {
        frozenset({0, 1, 2}), frozenset({4, 5, 6}), frozenset({8, 9, 10}),
    }  # fmt: skip


def test_more_noise_balances_less():
    numbers = list(range(0, 2000, 10))

    def spread(level):
        steps = steps_of(numbers, 4, random_level=level)
        return sum(max(numbers[i] for i in step) - min(numbers[i] for i in step) for step in steps)

    assert spread(0) == 50 * 30
    assert spread(0) < spread(0.1) < spread(1)
    with_noise = [steps_of(numbers, 4, epoch, random_level=0.5, shuffle=False) for epoch in (0, 1)]
    assert with_noise[0] != with_noise[1]


def test_noise_is_a_part_of_the_widest_range():
    numbers = [2**62, -(2**62), *range(50)]  # the difference of the first two is no int64
    noisy = steps_of(numbers, 1, shuffle=False, random_level=0.1)
    assert noisy != steps_of(numbers, 1, shuffle=False)


def test_each_sample_is_read_once_and_not_before_it_is_needed():
    dataset = Numbers([3, 1, 2])
    sampler = LoadBalancingDistributedSampler(dataset, itself, 1, 0, random_level=1)
    assert not dataset.reads
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sorted(sampler) == [0, 1, 2]
    assert sampler.complexities == [3, 1, 2]
    assert dataset.reads == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(
    "numbers",
    [
        [0.75, 0.25, 0.5],
        [torch.tensor(3), torch.tensor(1), torch.tensor(2)],
        [torch.tensor([0.5]), torch.tensor(0.25), 0.3],
        [2**62, -(2**62), 2**61],
        [True, False, True],
    ],
)
def test_kinds_of_numbers(numbers):
    steps = steps_of(numbers, 1, shuffle=False)
    want = [number.item() if isinstance(number, torch.Tensor) else number for number in numbers]
    assert [place for (place,) in steps] == stable_order(want)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "3", torch.ones(2), [1]])
def test_a_complexity_that_is_no_number(value):
    (sampler,) = samplers([0, value], 1)
    with pytest.raises(
        ValueError, match=r"complexity_fn: got .* for sample 1, want a finite number"
    ):
        list(sampler)


def test_what_is_kept_and_pickled():
    sampler = LoadBalancingDistributedSampler([4, 2, 8, 6, 5], itself, 2, 1, seed=3)
    sampler.set_epoch(7)
    assert (sampler.num_samples, sampler.total_size, sampler.epoch) == (3, 6, 7)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
    assert all(type(place) is int for place in sampler)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"world_size": 2, "rank": 2}, "rank: got 2, want one of 0 to 1"),
        ({"world_size": 2, "rank": -1}, "rank: got -1, want one of 0 to 1"),
        ({"world_size": 0, "rank": 0}, "world_size: got 0, want at least 1"),
        ({"random_level": 1.5}, r"random_level: got 1\.5, want 0 to 1"),
        ({"random_level": -0.1}, r"random_level: got -0\.1, want 0 to 1"),
        ({"random_level": math.nan}, "random_level: got nan, want 0 to 1"),
        ({"group_size": 0}, "group_size: got 0, want None or at least 1"),
    ],
)
def test_arguments_out_of_range(settings, words):
    with pytest.raises(ValueError, match=words):
        LoadBalancingDistributedSampler([1], itself, **{"world_size": 1, "rank": 0} | settings)


def test_a_dataset_without_places():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    for dataset, name in ((Stream(), "Stream"), (iter([1]), "list_iterator")):
        words = f"dataset: got {name}, want one with __getitem__ and __len__"
        with pytest.raises(TypeError, match=words):
            LoadBalancingDistributedSampler(dataset, itself, 1, 0)


@pytest.mark.parametrize("given", [{}, {"rank": 0}, {"world_size": 2}])
def test_no_defaults_without_torch_distributed(given, monkeypatch):
    words = "torch.distributed is not initialized, .*; call torch.distributed.init_process_group"
    with pytest.raises(RuntimeError, match=words):
        LoadBalancingDistributedSampler([1], itself, **given)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"torch.distributed is not in this torch, want it for"):
        LoadBalancingDistributedSampler([1], itself, **given)


# Batches.


def pairs(places):
    return [places[start : start + 2] for start in range(0, len(places), 2)]


def one_batch_each(places):
    return [[place] for place in places]


def by_sum(places):
    """Close a batch where its numbers sum up to 10: more batches where numbers are large."""
    batches, total = [[]], 0
    for place in places:
        if total > 10:
            batches.append([])
            total = 0
        batches[-1].append(place)
        total += place
    return batches


def batch_samplers(numbers, world, batch_fn, drop_last=False, **settings):
    return [
        LoadBalancingDistributedBatchSampler(sampler, batch_fn, drop_last)
        for sampler in samplers(numbers, world, **settings)
    ]


@given(
    COMPLEXITIES.filter(bool), WORLD_SIZES, EPOCHS,
    st.sampled_from([pairs, one_batch_each, by_sum]), st.booleans(),
)  # fmt: skip
def test_all_ranks_get_equally_many_batches(numbers, world, epoch, batch_fn, drop_last):
    own = []
    for sampler in samplers(numbers, world):
        sampler.set_epoch(epoch)
        own.append(batch_fn(list(sampler)))
    count = (min if drop_last else max)(map(len, own))
    of_ranks = batch_samplers(numbers, world, batch_fn, drop_last)
    for sampler, batches in zip(of_ranks, own, strict=True):
        sampler.set_epoch(epoch)
        got = list(sampler)
        assert len(sampler) == len(got) == count
        assert got == [batches[i % len(batches)] for i in range(count)]


def test_longer_ranks_are_cut_where_batches_are_dropped():
    def uneven(places):
        return one_batch_each(places) if 0 in places else [places]

    kept = batch_samplers(range(6), 2, uneven, drop_last=True, shuffle=False)
    assert [list(sampler) for sampler in kept] == [[[0]], [[1, 3, 5]]]
    assert [len(sampler) for sampler in kept] == [1, 1]
    padded = batch_samplers(range(6), 2, uneven, shuffle=False)
    assert [list(sampler) for sampler in padded] == [[[0], [2], [4]], [[1, 3, 5]] * 3]


def test_an_epoch_that_is_set_further_in():
    (outer,), (inner,), (neither,) = (batch_samplers(range(20), 1, pairs) for _ in range(3))
    outer.set_epoch(5)
    inner.sampler.set_epoch(5)
    assert list(inner) == list(outer)
    assert list(neither) != list(outer)


def test_batches_may_be_changed():
    (sampler,) = batch_samplers([1, 2, 3, 4], 1, pairs)
    want = [list(batch) for batch in sampler]
    for batch in sampler:
        batch.clear()
    assert list(sampler) == want


def test_a_rank_without_a_batch():
    def none_for_one(places):
        return [] if 1 in places else [places]

    words = "batch_fn: got no batch for rank 1 and 1 for another, .*; drop_last=True drops those"
    with pytest.raises(ValueError, match=words):
        batch_samplers([1, 2], 2, none_for_one, shuffle=False)
    assert [len(it) for it in batch_samplers([1, 2], 2, none_for_one, True, shuffle=False)] == [
        0,
        0,
    ]


def test_samplers_that_do_not_fit():
    with pytest.raises(ValueError, match="got list, want a LoadBalancingDistributedSampler"):
        LoadBalancingDistributedBatchSampler([1], pairs)
    (sampler,) = samplers([1], 1, drop_last=True)
    with pytest.raises(ValueError, match="sampler: got one with drop_last=True, want False; pass"):
        LoadBalancingDistributedBatchSampler(sampler, pairs)


def test_no_samples():
    assert steps_of([], 3) == steps_of([], 3, group_size=2, random_level=1) == []
    assert [list(sampler) for sampler in batch_samplers([], 2, pairs)] == [[], []]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_loads_in_the_order_of_the_sampler(workers):
    dataset = [torch.full((2,), value) for value in (9, 4, 7, 1, 8, 3, 5)]
    sampler = LoadBalancingDistributedSampler(dataset, lambda it: int(it[0]), 2, 1)
    batch_sampler = LoadBalancingDistributedBatchSampler(sampler, pairs)
    settings = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(dataset, batch_sampler=batch_sampler, **settings)
    singles = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers)
    orders = set()
    for epoch in range(3):
        batch_sampler.set_epoch(epoch)
        want = [[dataset[place][0].item() for place in batch] for batch in batch_sampler]
        assert [batch[:, 0].tolist() for batch in loader] == want
        assert len(loader) == len(want) == 2
        assert [it[0].item() for it in singles] == [number for batch in want for number in batch]
        orders.add(str(want))
    assert len(orders) > 1
