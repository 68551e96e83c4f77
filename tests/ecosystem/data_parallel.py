# What each rank of test_data_parallel.py does: trains networks in eager and through the engine, and
# saves what it has seen.
from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_ort
from torch_ort.fallback import FallbackWarning

STEPS = 4
Wrap = Callable[..., nn.Module]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Several buckets of one megabyte, or several parts to shard."""

    def __init__(self, width: int = 300, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(2))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Either(nn.Module):
    """Leaves parameters unused, others on each rank and at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 500), nn.Linear(16, 500)
        self.never = nn.Linear(4, 4)
        self.last = nn.Linear(500, 4)

    def forward(self, x: torch.Tensor, is_left: bool) -> torch.Tensor:
        return self.last(torch.tanh(self.left(x) if is_left else self.right(x)))


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 600), nn.GELU(), nn.Linear(600, 600), nn.LayerNorm(600), nn.Linear(600, 4)
    )


def normalized() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 300, bias=False), nn.BatchNorm1d(300), nn.Linear(300, 4),
    )  # fmt: skip


def sequences() -> nn.Module:
    return Stack(64, lambda width: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)))


class Case(NamedTuple):
    """A network, how it is wrapped, and how it is trained."""

    network: Callable[[], nn.Module]
    wrapping: Mapping[str, Any] = MappingProxyType({})
    rows: tuple[int, ...] = (16,)  # sizes of one row of the inputs
    micro_batches: int = 1
    autocast: bool = False
    chooses: str = ""  # who takes the left one of Either's: ranks in turn, or all at each step


PARALLEL_CASES = {
    "buckets": Case(Stack),
    "one bucket": Case(Stack, {"bucket_cap_mb": 25}),
    "modules of torch's own": Case(sequence),
    "buffers": Case(normalized, rows=(3, 8, 8)),
    "buffers of each rank": Case(normalized, {"forward_sync_buffers": False}, (3, 8, 8)),
    "unused parameters": Case(Either, {"find_unused_parameters": True}, chooses="in turn"),
    "static graph": Case(Stack, {"static_graph": True}),
    "static graph, unused": Case(Either, {"static_graph": True}, chooses="all"),
    "accumulated": Case(Stack, micro_batches=3),
    "autocast": Case(Stack, autocast=True),
    "views": Case(Stack, {"gradient_as_bucket_view": True}),
    "views, accumulated": Case(Stack, {"gradient_as_bucket_view": True}, micro_batches=2),
}
SHARDED_CASES = {
    "parts": Case(lambda: Stack(64)),
    "modules of torch's own": Case(sequences),
    "low precision": Case(
        lambda: Stack(64),
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "kept whole": Case(lambda: Stack(64), {"reshard_after_forward": False}),
    "accumulated": Case(lambda: Stack(64), micro_batches=2),
}


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="ort")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="ort")
    return module


def parallel(module: nn.Module, **wrapping: Any) -> nn.Module:
    return DistributedDataParallel(module, **{"bucket_cap_mb": 1, **wrapping})


PARALLEL_WRAPS: dict[str, Wrap] = {
    "eager": parallel,
    "compile(DDP)": lambda module, **wrapping: compiled(parallel(module, **wrapping)),
    "DDP(compile)": lambda module, **wrapping: parallel(compiled(module), **wrapping),
    "DDP.compile": lambda module, **wrapping: compiled_in_place(parallel(module, **wrapping)),
    "DDP(ORTModule)": lambda module, **wrapping: parallel(torch_ort.ORTModule(module), **wrapping),
}


def sharded(module: nn.Module, **wrapping: Any) -> nn.Module:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(module, mesh=mesh, **wrapping)


def in_parts(wrap_part: Callable[[nn.Module], nn.Module]) -> Wrap:
    def wrap(module: Stack, **wrapping: Any) -> nn.Module:
        for i, block in enumerate(module.blocks):
            module.blocks[i] = sharded(wrap_part(block), **wrapping)
        return sharded(module, **wrapping)

    return wrap


SHARDED_WRAPS: dict[str, Wrap] = {
    "eager": in_parts(lambda part: part),
    "parts compiled in place": in_parts(compiled_in_place),
    "parts compiled": in_parts(compiled),
    "parts in ORTModules": in_parts(torch_ort.ORTModule),
    "compiled as a whole": lambda module, **wrapping: sharded(compiled(module), **wrapping),
    "one ORTModule": lambda module, **wrapping: sharded(torch_ort.ORTModule(module), **wrapping),
}


def train(case: Case, wrap: Wrap) -> dict[str, Any]:
    """Train for some steps.

    Gives losses, gradients of all parameters at each step, parameters and buffers at the end, the
    warnings about the engine and its counters.
    """
    torch.compiler.reset()
    torch_ort.reset_counters()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network = case.network()
        model = wrap(network, **case.wrapping)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        losses, gradients = [], []
        for batch in batches(case):
            optimizer.zero_grad()
            for i, inputs in enumerate(batch):
                is_last = i == len(batch) - 1
                with synchronized(model, is_last), autocast(case):
                    loss = model(*inputs).float().square().mean()
                    loss.backward()
                losses.append(loss.detach())
            gradients.append([copy.deepcopy(whole(p.grad)) for p in parameters])
            optimizer.step()
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "parameters": [whole(p.detach()).clone() for p in parameters],
        "buffers": [buffer.clone() for buffer in network.buffers()],
        "warnings": [str(e.message) for e in caught if issubclass(e.category, FallbackWarning)],
        "counters": torch_ort.counters(),
    }


def batches(case: Case) -> Iterator[list[tuple]]:
    """Give the inputs of each step, in parts, others on each rank; their number changes."""
    rank = dist.get_rank()
    numbers = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        sizes = (4 + step, *case.rows)
        xs = [(torch.randn(sizes, generator=numbers),) for _ in range(case.micro_batches)]
        is_left = {"in turn": (step + rank) % 2 == 0, "all": True}.get(case.chooses)
        yield xs if is_left is None else [(*x, is_left) for x in xs]


def synchronized(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager:
    """Let ranks exchange the gradients of the last part of a step, and no others."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    elif not is_last:
        return model.no_sync()
    return contextlib.nullcontext()


def autocast(case: Case) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=case.autocast)


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Give all of a sharded tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(got: dict[str, Any], want: dict[str, Any], is_low: bool) -> str:
    """Give what differs from eager PyTorch beyond rounding; empty: nothing."""
    tolerance = {"rtol": 0.03, "atol": 0.01} if is_low else {"rtol": 1e-4, "atol": 1e-5}
    for part in ("losses", "gradients", "parameters", "buffers"):
        try:
            torch.testing.assert_close(got[part], want[part], **tolerance)
        except AssertionError as error:
            return f"{part}: {error}"
    return ""


def is_same_on_ranks(tensors: list[torch.Tensor | None]) -> bool:
    """Tell whether all ranks have the same bits."""
    flat = torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])
    of_first = flat.clone()
    dist.broadcast(of_first, 0)
    return torch.equal(flat, of_first)


def results_of(case: Case, wraps: Mapping[str, Wrap]) -> dict[str, dict[str, Any]]:
    """Train a case in eager and in other ways; give what is different, and what the engine did."""
    want = train(case, wraps["eager"])
    is_low = case.autocast or "mp_policy" in case.wrapping
    found = {}
    for name in [name for name in wraps if name != "eager"]:
        got = train(case, wraps[name])
        last = [
            *got["parameters"],
            *(gradient for of_step in got["gradients"] for gradient in of_step),
        ]
        found[name] = {
            "difference": difference(got, want, is_low),
            "is_same_on_ranks": is_same_on_ranks(last),
            "warnings": got["warnings"],
            "counters": got["counters"],
        }
    return found


def main(rank: int, folder: Path, ranks: int, kind: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    cases, wraps = {
        "parallel": (PARALLEL_CASES, PARALLEL_WRAPS), "sharded": (SHARDED_CASES, SHARDED_WRAPS),
    }[kind]  # fmt: skip
    chosen = {name: wraps[name] for name in ("eager", *names)}
    results = {name: results_of(case, chosen) for name, case in cases.items()}
    torch.save(results, folder / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
