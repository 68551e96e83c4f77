# What each rank of test_deepspeed.py does: trains networks under DeepSpeed in eager and through the
# engine, and saves what it has seen.
from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import families
import torch
import torch.distributed as dist
from torch import nn

import torch_ort
from torch_ort.fallback import FallbackWarning
from torch_ort.optim import FP16_Optimizer, FusedAdam

STEPS = 4
# Products of matrices in a step: of six layers, of which the first has no gradient of its input.
PRODUCTS = 6 + 12 - 1
SWITCH = "ORTMODULE_ENABLE_ZERO_STAGE3"


class Case(NamedTuple):
    """How a network is trained."""

    stage: int
    dtype: torch.dtype = torch.float32
    optimizer: str = "config"  # or "fused" or "torch", made before DeepSpeed
    road: str = "ORTModule"  # or "compile", "modules" (without the switch), or "leaves" (by hand)
    checkpoint: bool = False  # written after the steps, and gone on from
    accumulation: int = 1
    calls: int = 1  # before a backward
    family: str = ""  # of families.py; a network of blocks if empty


# The stages with both optimizers and types, the roads, and state that is written and read.
CASES = {
    "stage 1": Case(1),
    "stage 2": Case(2, checkpoint=True),
    "stage 3": Case(3, checkpoint=True),
    "stage 1 bf16": Case(1, torch.bfloat16, "fused"),
    "stage 2 bf16": Case(2, torch.bfloat16, "fused"),
    "stage 3 bf16": Case(3, torch.bfloat16, "fused"),
    "stage 3 by modules": Case(3, road="modules"),
    "stage 2 compiled": Case(2, road="compile"),
}
SLOW_CASES = {
    "stage 0": Case(0, accumulation=2),
    "stage 0 bf16": Case(0, torch.bfloat16, "torch", checkpoint=True),
    "stage 1 own optimizer": Case(1, torch.float32, "fused", checkpoint=True),
    "stage 2 own optimizer": Case(2, torch.float32, "fused", accumulation=2),
    "stage 3 own optimizer": Case(3, torch.float32, "fused", accumulation=2),
    "stage 1 bf16 checkpoint": Case(1, torch.bfloat16, checkpoint=True),
    "stage 2 bf16 checkpoint": Case(2, torch.bfloat16, checkpoint=True),
    "stage 3 bf16 checkpoint": Case(3, torch.bfloat16, checkpoint=True),
    "stage 3 by modules accumulated": Case(3, road="modules", accumulation=2),
    "stage 3 by modules called twice": Case(3, road="modules", calls=2),
    "stage 3 leaves wrapped by hand": Case(3, road="leaves"),
    "stage 1 compiled": Case(1, road="compile", checkpoint=True),
    "stage 2 bf16 compiled": Case(2, torch.bfloat16, road="compile"),
    "stage 3 compiled": Case(3, road="compile", checkpoint=True),
}
FAMILIES = ("bert", "gpt2", "t5", "llama", "vit")
FAMILY_CASES = {
    f"stage {stage} {family}": Case(stage, family=family) for family in FAMILIES for stage in (2, 3)
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_model(case: Case, is_ours: bool) -> nn.Module:
    torch.manual_seed(0)
    if case.family:
        model = families.make_model(case.family)
        return torch_ort.ORTModule(model) if is_ours else model
    blocks = [Block() for _ in range(2)]
    if case.road == "leaves" and is_ours:
        blocks = [torch_ort.ORTModule(block) for block in blocks]
    model = Model(blocks)
    if case.road == "leaves":
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [Block])
    is_wrapped = is_ours and case.road in ("ORTModule", "modules")
    return torch_ort.ORTModule(model) if is_wrapped else model


def start(case: Case, is_ours: bool) -> Any:
    """Return DeepSpeed's engine around a new network."""
    import deepspeed

    os.environ[SWITCH] = "0" if case.road == "modules" else "1"
    # In bfloat16 PyTorch's own kernels run, whose results are eager's to the bit.
    os.environ["TORCH_ORT_DISABLE"] = "own_kernels" if case.dtype is torch.bfloat16 else ""
    model = make_model(case, is_ours)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": case.dtype is torch.bfloat16},
        # 0: also parameters as small as these are divided among the ranks.
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = None
    if case.optimizer == "config":
        # PyTorch's, as DeepSpeed's own for the CPU takes minutes to build.
        settings = {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": settings}
    else:
        kind = {"fused": FusedAdam, "torch": torch.optim.AdamW}[case.optimizer]
        optimizer = kind(model.parameters(), lr=1e-3)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if is_ours and case.optimizer == "fused" and case.stage in (1, 2):
        assert FP16_Optimizer(optimizer) is optimizer
    if is_ours and case.road == "compile":
        engine.compile(backend="ort")
    return engine


def loss_of(engine: Any, case: Case, number: int) -> torch.Tensor:
    """Give the loss of a batch, others for each step and rank."""
    if case.family:
        rows = families.make_rows(case.family)[number * 4 : number * 4 + 4]
        return engine(**families.collate(rows)).loss
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(case.dtype)
    results = [engine(x + i) for i in range(case.calls)]
    return sum(result.float().square().mean() for result in results)


def train(engine: Any, case: Case, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(case.accumulation):
            number = (step * case.accumulation + micro) * 2 + dist.get_rank()
            loss = loss_of(engine, case, number)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def parameters_of(engine: Any) -> list[torch.Tensor]:
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


@contextlib.contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Collect the words of warnings that a graph runs in eager, or methods are replaced."""
    words: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield words
    ours = ("FP16_Optimizer", "DeepSpeed's ZeRO")
    words += [
        str(w.message)
        for w in seen
        if w.category is FallbackWarning or str(w.message).startswith(ours)
    ]


def run(case: Case, is_ours: bool, folder: Path) -> dict[str, Any]:
    """Train, and go on from what was written."""
    torch._dynamo.reset()
    torch_ort.reset_counters()
    with noted_warnings() as words:
        engine = start(case, is_ours)
        losses = train(engine, case, range(STEPS))
    found = {"counters": torch_ort.counters(), "warnings": words}
    if case.checkpoint:
        engine.save_checkpoint(str(folder), tag="state")
    last = range(STEPS, STEPS + 2)
    found |= {"losses": losses + train(engine, case, last), "parameters": parameters_of(engine)}
    if case.checkpoint:
        again = start(case, is_ours)
        again.load_checkpoint(str(folder), tag="state")
        losses += train(again, case, last)
        found["again"] = {"losses": losses, "parameters": parameters_of(again)}
        engine = again
    engine.destroy()
    return found


def main(rank: int, folder: Path, names: list[str]) -> None:
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
        TORCH_EXTENSIONS_DIR=str(folder / "extensions"),
    )  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed

    # An operator for ranks that share memory, which takes minutes to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    every = CASES | SLOW_CASES | FAMILY_CASES
    results = {
        name: {
            who: run(every[name], who == "ours", folder / f"{name} {who}")
            for who in ("eager", "ours")
        }
        for name in names
    }
    torch.save(results, folder / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
