# Data parallel training of two real processes, with an ORTModule inside DistributedDataParallel.
from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import LEAVE

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

WORKER = """
    import contextlib, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import torch_ort

    rank, store, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    def train(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 600), nn.GELU(), nn.Linear(600, 600), nn.LayerNorm(600),
                            nn.Linear(600, 4))
        model = DistributedDataParallel(wrap(net), bucket_cap_mb=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        numbers = torch.Generator().manual_seed(rank)
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                # Gradients of the first half stay on their rank.
                with model.no_sync() if micro == 0 else contextlib.nullcontext():
                    x = torch.randn(3 + step, 16, generator=numbers)
                    model(x).pow(2).mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    torch.save([train(lambda net: net), train(torch_ort.ORTModule)], result)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0 and counters["graphs_captured"] == 1, counters
    assert counters["backward_runs"] == 8, counters
    dist.destroy_process_group()
"""


def assert_trains_as_in_eager(folder: Path, program: str) -> None:
    """Train two ranks, each in eager and then as an ORTModule; compare the parameters."""
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(program) + LEAVE)
    results = [folder / f"{rank}.pt" for rank in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), folder / "store", result],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, result in enumerate(results)
    ]
    for process in started:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-4000:]
    (want, *_), ours = zip(*(torch.load(path, weights_only=True) for path in results), strict=True)
    for of_rank_0, of_rank_1, of_eager in zip(*ours, want, strict=True):
        assert torch.equal(of_rank_0, of_rank_1)
        torch.testing.assert_close(of_rank_0, of_eager, rtol=1e-4, atol=1e-6)


def test_two_ranks_train_as_in_eager(tmp_path):
    assert_trains_as_in_eager(tmp_path, WORKER)


SHARDED = """
    import sys, warnings
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import torch_ort

    rank, store, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    def train(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64),
                            nn.Linear(64, 4))
        model = fully_shard(wrap(net), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        numbers = torch.Generator().manual_seed(rank)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(3 + step, 16, generator=numbers)).pow(2).mean().backward()
            optimizer.step()
        return [p.full_tensor().detach() for p in model.parameters()]

    torch.save([train(lambda net: net), train(torch_ort.ORTModule)], result)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0 and counters["graphs_captured"] == 1, counters
    assert counters["backward_runs"] == 4, counters
    dist.destroy_process_group()
"""


def test_shards_train_as_in_eager(tmp_path):
    assert_trains_as_in_eager(tmp_path, SHARDED)
