"""Packing by tokens: budgets, the number of batches, and shares of the ranks."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from torch_ort.utils.data import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
    TokenBudgetBatchSampler,
    TokenBudgetPacker,
)

pytestmark = pytest.mark.ort_only

LENGTHS = st.lists(st.integers(0, 12), max_size=40)
PACKERS = st.builds(
    functools.partial,
    st.just(TokenBudgetPacker),
    max_tokens=st.integers(12, 60),
    max_samples=st.none() | st.integers(1, 5),
    pad_to_multiple_of=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 9),
)
WORLD_SIZES = st.integers(1, 6)


def tokens_of(batch, packer):
    """Count by padding a tensor, as a collator does."""
    rows = [torch.ones(packer.lengths[place]) for place in batch]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    rest = -padded.shape[1] % packer.pad_to_multiple_of
    return torch.nn.functional.pad(padded, (0, rest)).numel()


@given(LENGTHS, PACKERS, st.data())
def test_batches_stay_within_the_budget_and_share_out_the_samples(lengths, make, data):
    packer = make(lengths)
    places = data.draw(st.permutations(range(len(lengths))))
    batches = packer(places)
    assert Counter(place for batch in batches for place in batch) == Counter(places)
    assert packer(places) == batches
    for batch in batches:
        assert packer.padded_tokens(batch) == tokens_of(batch, packer) <= packer.max_tokens
        assert 1 <= len(batch) <= (packer.max_samples or len(batch))
    firsts = [min(map(places.index, batch)) for batch in batches]
    assert firsts == sorted(firsts)


def fewest_batches(packer):
    """Try all ways to cut the sorted samples."""
    places = sorted(range(len(packer.lengths)), key=packer.lengths.__getitem__)
    best = [0]
    for end in range(1, len(places) + 1):
        best.append(min(
            best[start] + 1
            for start in range(end)
            if packer.padded_tokens(places[start:end]) <= packer.max_tokens
            and (packer.max_samples is None or end - start <= packer.max_samples)
        ))  # fmt: skip
    return best[-1]


@given(st.lists(st.integers(0, 12), max_size=15), PACKERS)
def test_no_other_cuts_make_fewer_batches(lengths, make):
    packer = make(lengths)
    packer.window = None
    assert len(packer(range(len(lengths)))) == fewest_batches(packer)


def test_where_the_budget_ends():
    packer = TokenBudgetPacker([1, 2, 3, 4, 5], 8)
    assert packer(range(5)) == [[0, 1], [2, 3], [4]]
    assert packer(reversed(range(5))) == [[4], [2, 3], [0, 1]]
    assert TokenBudgetPacker([1, 2, 3, 4, 5], 8, max_samples=1)(range(5)) == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]
    assert TokenBudgetPacker([1, 2, 3, 4, 5], 8, pad_to_multiple_of=4)(range(5)) == [
        [0, 1], [2, 3], [4],
    ]  # fmt: skip
    assert TokenBudgetPacker([3, 3, 3], 9, pad_to_multiple_of=4)(range(3)) == [[0, 1], [2]]


def test_windows_are_sorted_up_and_down_in_turn():
    packer = TokenBudgetPacker([5, 1, 3, 2, 6, 4], 6, max_samples=1, window=3)
    assert packer.cut(range(6)) == [[1], [2], [0], [4], [5], [3]]
    packer.window = 1
    assert packer.cut([4, 0, 3]) == [[4], [0], [3]]


def test_a_sample_over_the_budget():
    words = (
        "sample 1 has 9 tokens alone, and 1 more, want at most max_tokens=8; shorten what is "
        "longer, raise max_tokens, or pass oversized='drop'"
    )
    with pytest.raises(ValueError, match=words):
        TokenBudgetPacker([8, 9, 10], 8)
    with pytest.raises(ValueError, match="sample 0 has 12 tokens alone, want at most max_tokens=8"):
        TokenBudgetPacker([7, 4], 8, pad_to_multiple_of=6)
    packer = TokenBudgetPacker([8, 9, 10], 8, oversized="drop")
    assert packer.oversized == [1, 2]
    assert packer(range(3)) == [[0]]
    assert [*TokenBudgetBatchSampler(packer, 1, 0)] == [[0]]


def test_lengths_in_a_tensor():
    packer = TokenBudgetPacker(torch.tensor([2, 1]), 4)
    assert packer.lengths == [2, 1]
    assert packer(torch.tensor([0, 1]).tolist()) == [[1, 0]]


@pytest.mark.parametrize(
    ("lengths", "settings", "error", "words"),
    [
        ([1], {"max_tokens": 0}, ValueError, "max_tokens: got 0, want at least 1"),
        ([1], {"max_samples": 0}, ValueError, "max_samples: got 0, want at least 1"),
        ([1], {"window": 0}, ValueError, "window: got 0, want at least 1"),
        ([1], {"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of: got 0, want at least"),
        ([1], {"oversized": "keep"}, ValueError, "oversized: got 'keep', want 'error' or 'drop'"),
        ([1, -1], {}, ValueError, "lengths: got -1 for sample 1, want at least 0"),
        ([1, 1.5], {}, TypeError, r"lengths: got 1\.5 for sample 1, want an int"),
    ],
)
def test_arguments_that_do_not_fit(lengths, settings, error, words):
    with pytest.raises(error, match=words):
        TokenBudgetPacker(lengths, **{"max_tokens": 8} | settings)


# Shares of the ranks.


def steps_of(packer, world, epoch=0, **settings):
    lists = []
    for rank in range(world):
        sampler = TokenBudgetBatchSampler(packer, world, rank, **settings)
        sampler.set_epoch(epoch)
        lists.append(list(sampler))
        assert len(sampler) == len(lists[-1])
    return list(zip(*lists, strict=True))


@given(LENGTHS, PACKERS, WORLD_SIZES, st.integers(0, 3), st.booleans())
def test_each_sample_is_seen_once_by_one_rank(lengths, make, world, epoch, shuffle):
    packer = make(lengths)
    steps = steps_of(packer, world, epoch, shuffle=shuffle)
    counts = Counter(place for step in steps for batch in step for place in batch)
    assert counts.keys() == set(range(len(lengths)))
    if len(lengths) >= world:
        assert len(steps) >= 1
    # Halving can always fill the last step where there are enough samples for it.
    if len(lengths) >= len(steps) * world:
        assert set(counts.values()) <= {1}
    for step in steps:
        assert all(packer.padded_tokens(batch) <= packer.max_tokens for batch in step)
        assert all(batch for batch in step)


@given(LENGTHS, PACKERS, WORLD_SIZES, st.integers(0, 3), st.booleans())
def test_batches_are_dropped_instead_of_halved(lengths, make, world, epoch, shuffle):
    packer = make(lengths)
    steps = steps_of(packer, world, epoch, shuffle=shuffle, drop_last=True)
    counts = Counter(place for step in steps for batch in step for place in batch)
    assert set(counts.values()) <= {1}
    if packer.window is None:
        assert len(steps) == len(packer(range(len(lengths)))) // world


@given(LENGTHS, PACKERS, WORLD_SIZES, st.booleans())
def test_ranks_get_neighbours_by_padded_length(lengths, make, world, shuffle):
    packer = make(lengths)
    steps = steps_of(packer, world, shuffle=shuffle)
    assume(sum(len(batch) for step in steps for batch in step) == len(lengths))  # none is repeated
    padded = [[packer.padded_tokens(batch) // len(batch) for batch in step] for step in steps]
    in_order = sorted(padded) if shuffle else padded
    numbers = [length for step in in_order for length in step]
    assert numbers == sorted(numbers)


@given(LENGTHS, PACKERS, WORLD_SIZES, st.integers(0, 2**40), st.integers(0, 3))
def test_seed_and_epoch_alone_decide(lengths, make, world, seed, epoch):
    packer = make(lengths)
    torch.manual_seed(1)
    first = steps_of(packer, world, epoch, seed=seed)
    torch.manual_seed(2)
    assert steps_of(make(lengths), world, epoch, seed=seed) == first
    assert steps_of(packer, world, 0, seed=seed + epoch) == first


def test_epochs_differ():
    packer = TokenBudgetPacker([1 + i % 7 for i in range(200)], 30)
    members = [
        {frozenset(batch) for step in steps_of(packer, 2, epoch) for batch in step}
        for epoch in range(2)
    ]
    assert members[0] != members[1]
    assert steps_of(packer, 2, 0, shuffle=False) == steps_of(packer, 2, 1, shuffle=False)
    distinct = TokenBudgetPacker(range(1, 101), 400)
    windowed = TokenBudgetPacker(range(1, 101), 400, window=20)
    for packer, differ in ((distinct, False), (windowed, True)):
        members = [
            {frozenset(batch) for step in steps_of(packer, 1, epoch) for batch in step}
            for epoch in range(2)
        ]
        assert (members[0] != members[1]) == differ
    assert steps_of(distinct, 1, 0) != steps_of(distinct, 1, 1)


def test_fewer_samples_than_ranks():
    packer = TokenBudgetPacker([1, 2], 8)
    assert steps_of(packer, 3, shuffle=False) == [([0], [1], [0])]
    assert steps_of(packer, 3, drop_last=True) == []
    assert steps_of(TokenBudgetPacker([], 8), 3) == []


def test_other_packers_are_refused():
    with pytest.raises(TypeError, match="packer: got list, want a TokenBudgetPacker"):
        TokenBudgetBatchSampler([[1]], 1, 0)
    with pytest.raises(ValueError, match="rank: got 3, want one of 0 to 1"):
        TokenBudgetBatchSampler(TokenBudgetPacker([1], 8), 2, 3)


@given(LENGTHS, PACKERS, WORLD_SIZES, st.integers(0, 3), st.booleans())
def test_as_a_batch_fn_all_ranks_get_equally_many(lengths, make, world, epoch, drop_last):
    dataset = [[0] * length for length in lengths]
    seen, counts = set(), set()
    for rank in range(world):
        sampler = LoadBalancingDistributedSampler(dataset, len, world, rank)
        packer = make(sampler.complexities)
        batches = LoadBalancingDistributedBatchSampler(sampler, packer, drop_last)
        batches.set_epoch(epoch)
        counts.add(len(list(batches)))
        seen |= {place for batch in batches for place in batch}
        assert all(packer.padded_tokens(batch) <= packer.max_tokens for batch in batches)
    assert len(counts) == 1
    if not drop_last:
        assert seen == set(range(len(lengths)))


def cut_by_32(places):
    places = list(places)
    return [places[start : start + 32] for start in range(0, len(places), 32)]


def test_how_much_is_padded_and_waited_for():
    # The table in docs/samplers.md: lengths as those of sentences, eight ranks.
    numbers = torch.empty(20_000).log_normal_(4.3, 0.7, generator=torch.Generator().manual_seed(0))
    lengths = numbers.int().clamp(4, 512).tolist()
    packer, world = TokenBudgetPacker(lengths, 4096), 8
    plain = [DistributedSampler(lengths, world, rank) for rank in range(world)]
    balanced = [LoadBalancingDistributedSampler(lengths, int, world, r) for r in range(world)]
    shares = {
        "plain": [cut_by_32(sampler) for sampler in plain],
        "balanced": [LoadBalancingDistributedBatchSampler(it, cut_by_32) for it in balanced],
        "balanced, packed": [LoadBalancingDistributedBatchSampler(it, packer) for it in balanced],
        "packed": [TokenBudgetBatchSampler(packer, world, rank) for rank in range(world)],
    }
    table = {}
    for name, ranks in shares.items():
        steps = [[packer.padded_tokens(batch) for batch in it] for it in zip(*ranks, strict=True)]
        tokens = sum(map(sum, steps))
        used = sum(lengths[place] for rank in ranks for batch in rank for place in batch)
        slowest = sum(map(max, steps)) * world
        table[name] = [round(100 * (1 - part)) for part in (used / tokens, tokens / slowest)]
    assert table == {
        "plain": [71, 31], "balanced": [72, 0], "balanced, packed": [3, 1], "packed": [0, 1],
    }  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pads_within_the_budget(workers):
    dataset = [torch.ones(1 + (7 * i) % 11) for i in range(50)]
    sampler = TokenBudgetBatchSampler(TokenBudgetPacker([len(it) for it in dataset], 40), 2, 0)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers,
        collate_fn=functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True),
    )  # fmt: skip
    sampler.set_epoch(1)
    sizes = [batch.numel() for batch in loader]
    assert len(sizes) == len(loader) == len(sampler)
    assert max(sizes) <= 40
    assert sizes == [sampler.packer.padded_tokens(batch) for batch in sampler]
