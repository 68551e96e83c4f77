# What each rank of test_graph_parallel.py does: trains a decoder with torch_ort.parallel, beside
# PyTorch's own way to do the same in eager, and saves what it has seen.
from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensor_parallel import WORDS, Decoder, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torch_ort
import torch_ort.parallel
from torch_ort.fallback import FallbackWarning

STEPS, FEW = 20, 6


def by_pytorch(net: Decoder, dtype: torch.dtype | None) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for part in (*net.blocks, net):
        fully_shard(part, mp_policy=policy)
    return net


class Case(NamedTuple):
    wrap: Callable[[Decoder], nn.Module]
    like: Callable[[Decoder], nn.Module]
    is_short: bool = False
    is_compiled: bool = True
    steps: int = STEPS


CASES = {
    "shards": Case(torch_ort.parallel.shard, lambda net: by_pytorch(net, None)),
    "shards that are held": Case(
        lambda net: torch_ort.parallel.shard(net, reshard_after_forward=False),
        lambda net: by_pytorch(net, None), steps=FEW,
    ),
    "shards in bfloat16": Case(
        lambda net: torch_ort.parallel.shard(net, param_dtype=torch.bfloat16),
        lambda net: by_pytorch(net, torch.bfloat16), is_short=True, steps=FEW,
    ),
    "shards in eager": Case(
        torch_ort.parallel.shard, lambda net: by_pytorch(net, None), is_compiled=False, steps=FEW
    ),
    "replicas": Case(torch_ort.parallel.replicate, DistributedDataParallel),
    "replicas in eager": Case(
        torch_ort.parallel.replicate, DistributedDataParallel, is_compiled=False, steps=FEW
    ),
}  # fmt: skip


def run(case: Case, rank: int) -> dict[str, Any]:
    torch._dynamo.reset()
    torch_ort.reset_counters()
    nets = []
    for _ in range(2):
        torch.manual_seed(rank)  # what rank 0 has is what counts
        nets.append(Decoder())
    nets[0].load_state_dict(nets[1].state_dict())
    if rank:
        torch.manual_seed(0)
        nets[0] = Decoder()  # fully_shard takes each rank's own numbers
    calls = [case.like(nets[0]), case.wrap(nets[1])]
    names = list(nets[1].state_dict())
    if case.is_compiled:
        calls[1] = torch.compile(calls[1], backend="ort", fullgraph=True)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    difference, losses = 0.0, [[], []]
    saved = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(case.steps):
            torch.manual_seed(100 * rank + step)
            x, y = torch.randint(0, WORDS, (2, 2, 16))
            gradients = []
            for net, call, seen in zip(nets, calls, losses, strict=True):
                loss = F.cross_entropy(call(x).flatten(0, 1).float(), y.flatten())
                saved.append(torch_ort.counters()["saved_bytes"])
                loss.backward()
                seen.append(loss.item())
                gradients.append([whole(each.grad).double() for each in net.parameters()])
            for want, got in zip(*gradients, strict=True):
                difference = max(difference, ((want - got).norm() / want.norm()).item())
            for mine, theirs in zip(*(net.parameters() for net in nets), strict=True):
                assert type(mine.grad) is type(theirs.grad)
                theirs.grad = mine.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    words = [str(each.message) for each in caught if issubclass(each.category, FallbackWarning)]
    return {
        "difference": difference, "losses": losses, "warnings": words, "names": names,
        "saved_bytes": saved[-1], "counters": dict(torch_ort.counters()),
    }  # fmt: skip


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def uneven(rank: int) -> float:
    """Train layers whose parts are larger on one rank, and empty on some."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3), nn.Linear(3, 1)))
    for part in (*nets[0], nets[0]):
        fully_shard(part)
    call = torch.compile(torch_ort.parallel.shard(nets[1]), backend="ort", fullgraph=True)
    worst = 0.0
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        x = torch.randn(4, 6)
        for net, run in zip(nets, (nets[0], call), strict=True):
            net.zero_grad()
            run(x).square().mean().backward()
        for mine, theirs in zip(*(net.parameters() for net in nets), strict=True):
            want, got = whole(mine.grad), whole(theirs.grad)
            worst = max(worst, ((want - got).norm() / want.norm()).item())
    assert torch_ort.counters()["fallbacks"] == 0
    return worst


class Tagger(nn.Module):
    """Recurrent layers, which keep their parameters in lists of their own."""

    def __init__(self, is_deep: bool) -> None:
        super().__init__()
        depth = {"num_layers": 2, "bidirectional": True} if is_deep else {}
        self.first = nn.LSTM(6, 8, batch_first=True, **depth)
        self.second = nn.GRU(16 if is_deep else 8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0].transpose(0, 1))[0]


def recurrent(rank: int) -> dict[str, float]:
    """Train recurrent layers in all ways, beside gradients that are averaged afterwards."""
    worst = {}
    for change in (torch_ort.parallel.shard, torch_ort.parallel.replicate):
        for is_compiled in (False, True):
            torch._dynamo.reset()
            torch_ort.reset_counters()
            nets = []
            for _ in range(2):
                torch.manual_seed(0)
                # Dynamo traces how a parameter is gathered wherever a list of all is read: seconds.
                nets.append(Tagger(is_deep=not is_compiled))
            call = change(nets[1])
            if is_compiled:
                call = torch.compile(call, backend="ort", fullgraph=True)
            name = f"{change.__name__}, {'compiled' if is_compiled else 'eager'}"
            worst[name] = 0.0
            captured = 0
            for step in range(3):
                torch.manual_seed(10 * rank + step)
                x = torch.randn(4, 7, 6)
                for net, run in zip(nets, (nets[0], call), strict=True):
                    net.zero_grad()
                    run(x).square().mean().backward()
                captured = captured or torch_ort.counters()["graphs_captured"]
                for mine, theirs in zip(*(net.parameters() for net in nets), strict=True):
                    dist.all_reduce(mine.grad)
                    want, got = mine.grad / dist.get_world_size(), whole(theirs.grad)
                    difference = ((want - got).norm() / want.norm()).item()
                    worst[name] = max(worst[name], difference)
            counters = torch_ort.counters()
            assert counters["fallbacks"] == counters["graph_breaks"] == 0
            assert (counters["forward_runs"] > 0) == is_compiled
            assert counters["graphs_captured"] == captured  # by the first step
    return worst


def refusals() -> list[str]:
    """Give what is said of modules that cannot be changed."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    sharded = torch_ort.parallel.shard(nn.Linear(4, 4))
    words = []
    for call in (
        lambda: torch_ort.parallel.shard(nn.Linear(4, 4), mesh),
        lambda: torch_ort.parallel.replicate(sharded),
        lambda: torch_ort.parallel.shard(
            torch_ort.parallel.replicate(nn.Sequential(nn.Linear(4, 4)))
        ),
        lambda: torch_ort.parallel.shard(Scaled()),
    ):
        try:
            call()
        except torch_ort.UserError as error:
            words.append(str(error))
    return words


def main() -> None:
    rank, folder, ranks, *names = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), int(ranks))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    found: dict[str, Any] = {name: run(CASES[name], int(rank)) for name in names}
    found["uneven"] = uneven(int(rank))
    found["recurrent"] = recurrent(int(rank))
    found["refusals"] = refusals()
    torch.save(found, Path(folder) / f"rank_{rank}.pt")


if __name__ == "__main__":
    main()
