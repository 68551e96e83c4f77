# What each rank of test_parallel_libraries.py does: trains what a library has split over the ranks.
from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torch_ort
from torch_ort.fallback import FallbackWarning


def difference(nets: list[nn.Module]) -> float:
    """Give the greatest difference of gradients, relative by norm."""
    found = 0.0
    for mine, theirs in zip(*(net.parameters() for net in nets), strict=True):
        want, got = (
            each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad
            for each in (mine, theirs)
        )  # fmt: skip
        found = max(found, ((want - got).norm() / want.norm()).item())
    return found


def llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip


def transformers_by_plan(rank: int, folder: Path) -> float:
    """Load a model by `tp_plan="auto"`, and train it."""
    # As torchrun sets them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    from transformers import LlamaForCausalLM

    if rank == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(llama_config()).save_pretrained(folder / "llama")
    dist.barrier()
    nets = [LlamaForCausalLM.from_pretrained(folder / "llama", tp_plan="auto") for _ in range(2)]
    calls = [nets[0], torch.compile(nets[1], backend="ort", fullgraph=True)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    worst = 0.0
    for step in range(3):
        torch.manual_seed(step)
        ids = torch.randint(0, 64, (2, 16))
        for call, optimizer in zip(calls, optimizers, strict=True):
            optimizer.zero_grad()
            call(input_ids=ids, labels=ids).loss.backward()
        worst = max(worst, difference(nets))
        for optimizer in optimizers:
            optimizer.step()
    return worst


def deepspeed_by_size(rank: int, folder: Path) -> float:
    """Let DeepSpeed split the layers of a model, and train it; give how far parameters differ."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    import deepspeed
    from transformers import LlamaForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},  # Adam makes rounding look large
    }
    engines = []
    for _ in range(2):
        torch.manual_seed(0)
        net = deepspeed.tp_model_init(
            LlamaForCausalLM(llama_config()), tp_size=2, dtype=torch.float32
        )
        engines.append(deepspeed.initialize(model=net, config=settings)[0])
    compiled = engines[1].module
    compiled.forward = torch.compile(compiled.forward, backend="ort", fullgraph=True)
    for step in range(3):
        torch.manual_seed(step)
        ids = torch.randint(0, 64, (2, 16))
        for engine in engines:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    pairs = zip(*(engine.module.parameters() for engine in engines), strict=True)
    return max(((mine - want).norm() / want.norm()).item() for want, mine in pairs)


def pipeline_of_stages(rank: int, folder: Path) -> float:
    """Compile each stage of a pipeline by itself."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
    whole, own = nn.Sequential(*copy.deepcopy(layers)), layers[rank]
    stage = PipelineStage(torch.compile(own, backend="ort"), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    schedule.step(x) if rank == 0 else schedule.step(target=y)
    F.mse_loss(whole(x), y).backward()
    return difference([whole[rank], own])


def reducer_in_python(rank: int, folder: Path) -> float:
    """Let compiled autograd trace what DistributedDataParallel does in backward."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))]
    nets.append(copy.deepcopy(nets[0]))
    eager = nn.parallel.DistributedDataParallel(nets[0])
    torch._dynamo.config.optimize_ddp = "python_reducer"
    call = torch.compile(nn.parallel.DistributedDataParallel(nets[1]), backend="ort")
    torch.manual_seed(rank)
    x = torch.randn(8, 16)
    eager(x).square().mean().backward()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="ort")):
        call(x).square().mean().backward()
    return difference(nets)


CASES = {each.__name__: each for each in (pipeline_of_stages, reducer_in_python)}
# Each by itself: not everyone has these libraries.
OTHER_CASES = {each.__name__: each for each in (transformers_by_plan, deepspeed_by_size)}


def main() -> None:
    rank, folder, *names = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name in names:
        torch._dynamo.reset()
        torch_ort.reset_counters()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            worst = {**CASES, **OTHER_CASES}[name](rank, folder)
        words = [str(each.message) for each in caught if each.category is FallbackWarning]
        counters = dict(torch_ort.counters())
        found[name] = {"difference": worst, "warnings": words, "counters": counters}
    torch.save(found, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    main()
