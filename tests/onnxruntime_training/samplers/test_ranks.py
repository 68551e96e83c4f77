"""Samplers in real processes: defaults of rank and world size, and steps that come out even."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from processes import run_script

from torch_ort.utils.data import LoadBalancingDistributedSampler, TokenBudgetPacker

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

TRAIN = """
    import functools, sys
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from torch_ort.utils.data import *

    dataset = [torch.full((1 + (7 * i) % 23,), i) for i in range(101)]
    pad = functools.partial(
        torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_value=-1
    )

    def make(name):
        if name == "packer":
            lengths = [len(it) for it in dataset]
            return TokenBudgetBatchSampler(TokenBudgetPacker(lengths, 64))
        sampler = LoadBalancingDistributedSampler(dataset, len)
        packer = TokenBudgetPacker(sampler.complexities, 64)
        return LoadBalancingDistributedBatchSampler(sampler, packer, drop_last=name == "drop")

    rank, folder, world = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    seen = {}
    for name in ("balanced", "drop", "packer"):
        batch_sampler = make(name)
        loader = DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=pad)
        for epoch in range(2):
            batch_sampler.set_epoch(epoch)
            steps = seen[name, epoch] = []
            for batch in loader:
                # Hangs where another rank has more batches.
                model(batch.reshape(-1, 1).float()).mean().backward()
                steps.append((batch[:, 0].tolist(), batch.numel()))
    torch.save(seen, f"{folder}/rank_{rank}.pt")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_together(world, tmp_path):
    ranks = run_script(TRAIN, tmp_path, str(world), ranks=world)
    for name, epoch in ranks[0]:
        steps = list(zip(*(rank[name, epoch] for rank in ranks), strict=True))
        places = [place for step in steps for batch, _ in step for place in batch]
        assert all(0 < tokens <= 64 for step in steps for _, tokens in step)
        if name != "drop":
            assert set(places) == set(range(101))
        if name == "packer":
            assert len(places) == 101
    for rank, seen in enumerate(ranks):
        assert seen["packer", 0] != seen["packer", 1]
        assert seen["balanced", 0] != seen["balanced", 1]
        dataset = [[0] * (1 + (7 * i) % 23) for i in range(101)]
        sampler = LoadBalancingDistributedSampler(dataset, len, world, rank)
        batches = TokenBudgetPacker(sampler.complexities, 64)(list(sampler))
        assert [batch for batch, _ in seen["balanced", 0]][: len(batches)] == batches


def test_one_of_both_may_be_given(tmp_path):
    script = """
        import sys
        import torch
        import torch.distributed as dist
        from torch_ort.utils.data import *

        rank, folder = int(sys.argv[1]), sys.argv[2]
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        made = [
            LoadBalancingDistributedSampler([1, 2], int),
            LoadBalancingDistributedSampler([1, 2], int, world_size=5),
            LoadBalancingDistributedSampler([1, 2], int, rank=1),
            TokenBudgetBatchSampler(TokenBudgetPacker([1], 1)),
        ]
        torch.save([(it.world_size, it.rank) for it in made], f"{folder}/rank_{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    """
    assert run_script(script, tmp_path, ranks=2) == [
        [(2, rank), (5, rank), (2, 1), (2, rank)] for rank in range(2)
    ]
