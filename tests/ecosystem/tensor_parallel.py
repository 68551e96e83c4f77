# What each rank of test_tensor_parallel.py does: trains a small decoder that is split over ranks in
# eager PyTorch and through the engine, and saves what it has seen.
from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import torch_ort
from torch_ort.fallback import FallbackWarning

STEPS, FEW = 20, 8
WORDS, WIDTH, HEADS, LENGTH = 48, 32, 4, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.second_norm, self.gated = nn.RMSNorm(WIDTH), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.gated(self.second_norm(x))


class Decoder(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


COLUMNS = ("attention.q", "attention.k", "attention.v", "gated.gate", "gated.up")
ROWS = ("attention.out", "gated.down")


def by_tensors(net: Decoder, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)


def by_words(net: Decoder, mesh: DeviceMesh) -> None:
    by_tensors(net, mesh)
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)


def by_sequence(net: Decoder, mesh: DeviceMesh) -> None:
    gathered = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )  # fmt: skip
    for block in net.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS}
        plan |= {"first_norm": SequenceParallel(), "second_norm": SequenceParallel()}
        parallelize_module(block, mesh, {**plan, "attention": gathered, "gated": gathered})
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)


def by_loss(net: Decoder, mesh: DeviceMesh) -> None:
    by_tensors(net, mesh)
    parallelize_module(net, mesh, {"head": ColwiseParallel(use_local_output=False)})


class Case(NamedTuple):
    split: Callable[[Decoder, DeviceMesh], None]
    dtype: torch.dtype = torch.float32
    lengths: Sequence[int] = (LENGTH,)  # of the steps, in turn
    loss_is_split: bool = False
    is_sharded: bool = False  # by fully_shard over the other dim of the mesh
    road: str = "compile"
    steps: int = STEPS
    depth: int = 2


CASES = {
    "tensors": Case(by_tensors),
    "words and head": Case(by_words, steps=FEW, depth=1),
    "sequence": Case(by_sequence),
    "loss": Case(by_loss, loss_is_split=True, steps=FEW, depth=1),
    "bfloat16": Case(by_tensors, torch.bfloat16, steps=FEW, depth=1),
    "several lengths": Case(by_tensors, lengths=(16, 20, 12, 24), steps=FEW, depth=1),
    "sequences of several lengths": Case(by_sequence, lengths=(16, 20, 12, 24), steps=FEW, depth=1),
    "ORTModule": Case(by_tensors, road="ORTModule", steps=FEW, depth=1),
}
SHARDED_CASES = {"tensors and shards": Case(by_tensors, is_sharded=True)}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def prepared(case: Case, mesh: DeviceMesh) -> Decoder:
    torch.manual_seed(0)
    net = Decoder(case.depth).to(case.dtype)
    case.split(net, mesh["tensors"])
    if case.is_sharded:
        for block in net.blocks:
            fully_shard(block, mesh=mesh["shards"])
        fully_shard(net, mesh=mesh["shards"])
    return net


def compiled(case: Case, net: Decoder) -> Callable[..., torch.Tensor]:
    if case.road == "ORTModule":
        return torch_ort.ORTModule(net)
    if case.is_sharded:
        for block in net.blocks:
            block.compile(backend="ort")
        return net
    return torch.compile(net, backend="ort", fullgraph=True)


def run(case: Case) -> dict[str, Any]:
    """Train in both ways, side by side; give the greatest difference of gradients by norm."""
    ranks = dist.get_world_size()
    names = ("shards", "tensors") if case.is_sharded else ("tensors",)
    mesh = init_device_mesh("cpu", (ranks // 2, 2)[-len(names) :], mesh_dim_names=names)
    torch._dynamo.reset()
    torch_ort.reset_counters()
    nets = [prepared(case, mesh) for _ in range(2)]
    calls = [nets[0], compiled(case, nets[1])]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    around = loss_parallel if case.loss_is_split else contextlib.nullcontext
    difference, kinds, losses = 0.0, set(), [[], []]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(case.steps):
            torch.manual_seed(100 + step)
            x, y = torch.randint(0, WORDS, (2, 2, case.lengths[step % len(case.lengths)]))
            gradients = []
            for net, call, seen in zip(nets, calls, losses, strict=True):
                with around():
                    loss = F.cross_entropy(call(x).flatten(0, 1), y.flatten())
                    loss.backward()
                seen.append(whole(loss).item())
                gradients.append([whole(each.grad).double() for each in net.parameters()])
                kinds.add(tuple(type(each.grad).__name__ for each in net.parameters()))
            for want, got in zip(*gradients, strict=True):
                difference = max(difference, ((want - got).norm() / want.norm()).item())
            # The next gradients are compared at equal weights.
            for mine, theirs in zip(*(net.parameters() for net in nets), strict=True):
                theirs.grad = mine.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    words = [str(each.message) for each in caught if issubclass(each.category, FallbackWarning)]
    return {
        "difference": difference, "losses": losses, "kinds": len(kinds), "warnings": words,
        "counters": dict(torch_ort.counters()),
    }  # fmt: skip


def main() -> None:
    rank, folder, ranks, *names = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), int(ranks))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    every = {**CASES, **SHARDED_CASES}
    torch.save({name: run(every[name]) for name in names}, Path(folder) / f"rank_{rank}.pt")


if __name__ == "__main__":
    main()
