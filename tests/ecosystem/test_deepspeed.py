# DeepSpeed's ZeRO stages on two processes: losses and parameters are those of eager DeepSpeed, the
# engine has run the products of every step, and what was written is gone on from.
from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import zero
from processes import run_script

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.ort_only,
    # Not imported here, which takes seconds.
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

Results = list[dict[str, dict[str, dict[str, Any]]]]  # of each rank, by case and who ran it


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[str], Results]:
    """Return a function that gives what each rank has seen; processes are started once a group."""

    @functools.cache
    def run(names: Iterable[str]) -> Results:
        script = Path(zero.__file__).read_text()
        paths = [str(Path(zero.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return run_script(
            script, tmp_path_factory.mktemp("zero"), *names, ranks=2, timeout=540,
            TORCH_ORT_STRICT="0", TORCH_ORT_EXACT_RANDOM="1",
            PYTHONPATH=os.pathsep.join(paths),
        )  # fmt: skip

    groups = [tuple(group) for group in (zero.CASES, zero.SLOW_CASES, zero.FAMILY_CASES)]
    return lambda case: run(next(group for group in groups if case in group))


ALL_CASES = zero.CASES | zero.SLOW_CASES | zero.FAMILY_CASES


def cases(holds: Callable[[zero.Case], bool] = lambda case: True) -> list:
    """Give the names of cases of which something holds; most are slow."""
    found = [name for name, case in ALL_CASES.items() if holds(case)]
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in zero.CASES else slow) for name in found]


def assert_same(ours: Any, eager: Any, tolerance: float) -> None:
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("name", cases())
def test_training_is_that_of_eager(name: str, results_of: Callable) -> None:
    results = results_of(name)
    for of_rank in results:
        ours, eager = of_rank[name]["ours"], of_rank[name]["eager"]
        assert_same(ours["losses"], eager["losses"], 1e-5)
        assert_same(ours["parameters"], eager["parameters"], 1e-3)
    first, second = [of_rank[name]["ours"]["parameters"] for of_rank in results]
    assert_same(first, second, 0)


@pytest.mark.parametrize("name", cases(lambda case: case.checkpoint))
def test_a_checkpoint_is_gone_on_from_to_the_bit(name: str, results_of: Callable) -> None:
    for of_rank in results_of(name):
        ours = of_rank[name]["ours"]
        assert ours["again"]["losses"] == ours["losses"]
        assert_same(ours["again"]["parameters"], ours["parameters"], 0)


@pytest.mark.parametrize("name", cases())
def test_the_engine_runs_without_a_fallback(name: str, results_of: Callable) -> None:
    case = ALL_CASES[name]
    for of_rank in results_of(name):
        counters = of_rank[name]["ours"]["counters"]
        assert counters["fallbacks"] == counters["captures_refused"] == 0
        assert counters["backward_runs"] >= zero.STEPS * case.accumulation * case.calls


def has_counted_products(case: zero.Case) -> bool:
    """Tell whether the engine's own kernels multiply, and what is outside of it does not."""
    return case.dtype is torch.float32 and case.road != "leaves" and not case.family


@pytest.mark.parametrize("name", cases(has_counted_products))
def test_the_engine_runs_all_products(name: str, results_of: Callable) -> None:
    case = ALL_CASES[name]
    runs = zero.STEPS * case.accumulation * case.calls
    for of_rank in results_of(name):
        counters = of_rank[name]["ours"]["counters"]
        assert counters["steps_product"] == zero.PRODUCTS * runs


@pytest.mark.parametrize("name", cases(lambda case: case.family and case.stage == 3))
def test_the_engine_runs_nine_in_ten_products_of_a_whole_graph(
    name: str, results_of: Callable
) -> None:
    whole = f"stage 2 {ALL_CASES[name].family}"
    for of_rank in results_of(name):
        want = of_rank[whole]["ours"]["counters"]
        assert want["graphs_captured"] < of_rank[name]["ours"]["counters"]["graphs_captured"]
        # Blocks of T5's decoder get a cache, with which no graph is captured: there each of their
        # layers is a graph, and the products between these are PyTorch's.
        got = of_rank[name]["ours"]["counters"]["steps_product"]
        assert got >= (0.9 if name.endswith("t5") else 1) * want["steps_product"] > 0


@pytest.mark.parametrize("name", cases())
def test_warnings_name_what_is_replaced(name: str, results_of: Callable) -> None:
    case = ALL_CASES[name]
    is_replaced = case.optimizer == "fused" and case.stage in (1, 2)
    for of_rank in results_of(name):
        words = of_rank[name]["ours"]["warnings"]
        if case.road == "compile" and case.stage == 3:  # what Dynamo cannot trace of DeepSpeed
            assert all("partitioned_param_coordinator.py" in it for it in words)
        else:
            assert ["FP16_Optimizer" in it for it in words] == [True] * is_replaced


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("stage 1", 1),
        ("stage 2 compiled", 1),
        # Two layers and two blocks, or the three modules of each.
        ("stage 3", 4),
        ("stage 3 by modules", 8),
    ],
)
def test_a_graph_for_what_is_gathered_at_once(name, graphs, results_of) -> None:
    for of_rank in results_of(name):
        assert of_rank[name]["ours"]["counters"]["graphs_captured"] == graphs


SETUP = """
    import os, sys

    import torch

    rank, folder = int(sys.argv[1]), sys.argv[2]
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
        TORCH_EXTENSIONS_DIR=folder + "/extensions",
    )
    torch.set_num_threads(1)
    import deepspeed
    import torch.distributed as dist
    from torch import nn

    import torch_ort

    # An operator for ranks that share memory, which takes minutes to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def report(**values):
        torch.save({**values, "counters": torch_ort.counters()}, f"{folder}/rank_{rank}.pt")
        dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checks_in_one_pass_find_what_those_of_deepspeed_find(tmp_path, stage, dtype):
    script = """
    import warnings

    from torch_ort.optim import FP16_Optimizer, FusedAdam

    stage, dtype = int(sys.argv[3]), getattr(torch, sys.argv[4])
    short = dtype is torch.bfloat16

    def train(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), Block(), nn.Linear(64, 4))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": short, "check_grad_overflow": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config
        )
        assert wrap(optimizer) is optimizer
        numbers = torch.Generator().manual_seed(rank)
        losses, norms, skipped = [], [], []
        for step in range(5):
            # Gradients of one rank alone are not finite.
            factor = float("inf") if short and step == 2 and rank == 1 else 1.0
            x = torch.randn(4, 16, generator=numbers).to(dtype)
            loss = engine(x).float().pow(2).mean() * factor
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(float(engine.get_global_grad_norm() or 0))
            skipped.append(bool(optimizer.overflow))
        infinite = nn.Parameter(torch.ones(3))
        found = []
        for value in (1.0, float("inf"), float("nan")):
            infinite.grad = torch.tensor([0.0, value, 1.0])
            found.append(bool(optimizer.has_overflow_serial([nn.Parameter(x[0]), infinite])))
        parameters = [p.detach().clone() for p in engine.module.parameters()]
        return {"losses": losses, "norms": norms, "skipped": skipped, "found": found,
                "parameters": parameters}

    theirs = train(lambda optimizer: optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = train(FP16_Optimizer)
    words = [str(w.message) for w in seen if str(w.message).startswith("FP16_Optimizer")]
    report(eager=theirs, ours=ours, words=words)
    """
    for report in run_script(SETUP + script, tmp_path, stage, dtype, ranks=2):
        ours, theirs = report["ours"], report["eager"]
        assert_same(ours, theirs, 1e-5)
        assert ours["skipped"] == [False, False, dtype == "bfloat16", False, False]
        assert ours["found"] == [False, True, True]
        (words,) = report["words"]
        assert "has_overflow_serial, get_grad_norm_direct, has_overflow_partitioned_grads" in words
        assert "DeepSpeedZeroOptimizer are replaced" in words
