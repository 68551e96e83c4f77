"""Graphs that communicate, beside eager PyTorch with the same parallelism: steps in turns.

Start it with torchrun --nproc-per-node 2 benchmarks/parallel_graphs.py --kind shards
"""

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torch_ort
import torch_ort.parallel

HEADS = 8
PASSES = ("join_collectives", "bucket_collectives", "overlap_collectives")


class Block(nn.Module):
    """A decoder layer with products that can be split by columns and then by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = nn.ModuleDict(
            {name: nn.Linear(width, width, bias=False) for name in "qkvo"}
        )
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = width // HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give a sequence of the same sizes (batch, length, width)."""
        h = self.first_norm(x)
        q, k, v = (
            self.attention[name](h).unflatten(-1, (-1, self.head)).transpose(1, 2) for name in "qkv"
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention["o"](h)
        h = self.second_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A language model without position embeddings."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give logits (batch, length, words)."""
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


COLUMNS = ("attention.q", "attention.k", "attention.v", "gate", "up")
ROWS = ("attention.o", "down")


def by_tensors(net: Decoder, mesh: DeviceMesh) -> nn.Module:
    plan = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return net


def by_sequence(net: Decoder, mesh: DeviceMesh) -> nn.Module:
    plan = {name: ColwiseParallel(input_layouts=Shard(1)) for name in COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS}
    plan |= {"first_norm": SequenceParallel(), "second_norm": SequenceParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(net, mesh, {"words": words, "norm": SequenceParallel(), "head": head})


def by_shards(net: Decoder, mesh: DeviceMesh) -> nn.Module:
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh)
    return net


# Of each kind: what eager PyTorch does, and what is compiled as a whole.
Wrap = Callable[[Decoder, DeviceMesh], nn.Module]
KINDS: dict[str, tuple[Wrap, Wrap]] = {
    "tensors": (by_tensors, by_tensors),
    "sequence": (by_sequence, by_sequence),
    "shards": (by_shards, torch_ort.parallel.shard),
    "replicas": (lambda net, mesh: DistributedDataParallel(net), torch_ort.parallel.replicate),
}
WAYS = ("eager", "graph", "graph as captured")


def made(way: str, options: argparse.Namespace, mesh: DeviceMesh) -> tuple[nn.Module, Callable]:
    """Give a module and what runs it."""
    torch.manual_seed(0)
    net = Decoder(options.words, options.width, options.layers)
    eager, whole = KINDS[options.kind]
    if way == "eager":
        return net, eager(net, mesh)
    disable = PASSES if way == "graph as captured" else ()
    call = torch.compile(
        whole(net, mesh), backend="ort", fullgraph=True, options={"disable": disable}
    )
    return net, call


def main() -> None:
    """Time all ways in turns, and print a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="tensors")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--words", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--only", choices=WAYS, help="run one way, and print the peak of memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randint(0, options.words, (options.batch, options.length))
    y = torch.randint(0, options.words, (options.batch * options.length,))

    def step(net: nn.Module, call: Callable) -> float:
        dist.barrier()
        start = time.perf_counter()
        F.cross_entropy(call(x).flatten(0, 1), y).backward()
        taken = time.perf_counter() - start
        net.zero_grad()
        return taken

    ways = [options.only] if options.only else WAYS
    models = {way: made(way, options, mesh) for way in ways}
    for net, call in models.values():
        for _ in range(3):
            step(net, call)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    hidden: dict[str, list[int]] = {way: [0, 0] for way in ways}
    names = ("collectives_flight_us", "collectives_waited_us")
    for _ in range(options.turns):
        for way, (net, call) in models.items():
            before = torch_ort.counters()
            seconds[way].append(step(net, call))
            after = torch_ort.counters()
            for i, name in enumerate(names):
                hidden[way][i] += after[name] - before[name]
    if dist.get_rank() == 0:
        base = seconds[ways[0]]
        print(f"{options.kind}, {dist.get_world_size()} ranks: ms a step, of {ways[0]}'s, hidden")
        for way, times in seconds.items():
            flight, waited = hidden[way]
            share = f"{1 - waited / flight:.2f}" if flight else "-"
            print(
                f"{way:20} {1e3 * min(times):8.1f} {1e3 * statistics.median(times):8.1f} "
                f"{min(times) / min(base):6.3f} "
                f"{statistics.median(times) / statistics.median(base):6.3f} "
                f"{share}"
            )
        print(f"fallbacks {torch_ort.counters()['fallbacks']}", end="")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f", peak {peak:.0f} MiB" if options.only else "")
    dist.barrier()


if __name__ == "__main__":
    main()
    # See leave() in examples/ranks.py.
    sys.stdout.flush()
    os._exit(0)
