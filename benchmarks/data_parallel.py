"""Which order of torch.compile and DistributedDataParallel is better: steps of a model, in turns.

Start it with torchrun --nproc-per-node 2 benchmarks/data_parallel.py
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from types import FunctionType

import torch
import torch.distributed as dist
from models import MODELS, Batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_ort


def compiled(module: nn.Module) -> Callable:
    return torch.compile(module, backend="ort")


# "whole": no graph is split where a bucket of gradients ends.
WAYS: dict[str, tuple[Callable[[nn.Module, int], Callable], bool]] = {
    "eager": (lambda module, mb: parallel(module, mb), True),
    "compile(DDP)": (lambda module, mb: compiled(parallel(module, mb)), True),
    "DDP(compile)": (lambda module, mb: parallel(compiled(module), mb), True),
    "compile(DDP), whole": (lambda module, mb: compiled(parallel(module, mb)), False),
    "DDP(compile), whole": (lambda module, mb: parallel(compiled(module), mb), False),
    "DDP(ORTModule)": (lambda module, mb: parallel(torch_ort.ORTModule(module), mb), True),
}


def parallel(module: nn.Module, bucket_mb: int) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb)


def give_own_code(module: nn.Module) -> None:
    """Let Dynamo, which keeps graphs by code, compile a module anew."""
    kind = type(module)
    theirs = kind.forward
    ours = FunctionType(
        theirs.__code__.replace(), theirs.__globals__, theirs.__name__, theirs.__defaults__,
        theirs.__closure__,
    )  # fmt: skip
    module.__class__ = type(kind.__name__, (kind,), {"forward": ours})


def step(model: Callable, module: nn.Module, batch: Batch) -> tuple[float, float]:
    """Run forward and backward; return seconds by the clock, and of this process's processors."""
    module.zero_grad()
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    model(*batch).backward()
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    """Time all ways in turns, and print a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="lm_d256")
    parser.add_argument("--bucket-mb", type=int, default=4, help="size of a bucket of gradients")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models, graphs = {}, {}
    for name, (wrap, splits) in WAYS.items():
        torch.manual_seed(0)
        torch_ort.reset_counters()
        workload = MODELS[options.model]()
        give_own_code(workload.model)
        torch._dynamo.config.optimize_ddp = splits
        models[name] = wrap(workload.model, options.bucket_mb), workload
        for batch in islice(workload.batches, 2):
            step(models[name][0], workload.model, batch)
        graphs[name] = torch_ort.counters()["graphs_captured"]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for turn in range(options.turns):
        for name, (model, workload) in models.items():
            torch._dynamo.config.optimize_ddp = WAYS[name][1]
            batch = workload.batches[turn % len(workload.batches)]
            seconds[name].append(step(model, workload.model, batch))
    if dist.get_rank() == 0:
        print_table(seconds, graphs, f"{options.model}, buckets of {options.bucket_mb} MB")
    dist.barrier()
    dist.destroy_process_group()


def print_table(seconds: dict[str, list], graphs: dict[str, int], title: str) -> None:
    """Print times of a step, and their ratios to eager's, by the clock and of the processors."""
    print(f"{title}, {dist.get_world_size()} ranks: ms a step, and the ratio to eager's")
    print(f"{'':20} graphs {'min':>15} {'median':>15} {'processor min':>15} {'median':>15}")
    of_eager = figures(seconds["eager"])
    for name, times in seconds.items():
        columns = [
            f"{1e3 * time:8.1f} {time / base:6.3f}"
            for time, base in zip(figures(times), of_eager, strict=True)
        ]
        print(f"{name:20} {graphs[name]:6} {' '.join(columns)}")


def figures(times: list[tuple[float, float]]) -> list[float]:
    return [f(column) for column in zip(*times, strict=True) for f in (min, statistics.median)]


if __name__ == "__main__":
    main()
    # See leave() in examples/ranks.py.
    sys.stdout.flush()
    os._exit(0)
