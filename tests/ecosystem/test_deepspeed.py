# DeepSpeed's ZeRO stages around ORTModules, in two processes.
from __future__ import annotations

import pytest
import torch
from processes import run_script

pytestmark = pytest.mark.slow

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

    def start(stage, wrap_block, wrap_all, dtype=torch.float32):
        torch.manual_seed(0)
        blocks = [wrap_block(Block()) for _ in range(2)]
        model = wrap_all(nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 4)))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": dtype is torch.bfloat16},
            # 0: also parameters as small as these are divided among the ranks.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine

    def train(engine, calls=1, dtype=torch.float32):
        numbers = torch.Generator().manual_seed(rank)
        losses = []
        for step in range(6):
            x = torch.randn(4, 16, generator=numbers).to(dtype)
            results = [engine(x + i) for i in range(calls)]
            loss = sum(result.float().pow(2).mean() for result in results)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        parameters = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            return {"losses": losses, "parameters": [p.detach().clone() for p in parameters]}

    def plain(module):
        return module

    def report(**values):
        torch.save({**values, "counters": torch_ort.counters()}, f"{folder}/rank_{rank}.pt")
        dist.destroy_process_group()
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script in two ranks and checks that their parameters agree."""
    pytest.importorskip("deepspeed")

    def run_ranks(script, *args, **environment):
        reports = run_script(SETUP + script, tmp_path, *args, ranks=2, **environment)
        assert_same(reports[0]["ours"]["parameters"], reports[1]["ours"]["parameters"], 0)
        for report in reports:
            assert_same(report["ours"], report["eager"], 1e-3)
        return reports

    return run_ranks


def assert_same(ours, eager, tolerance):
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance / 10)


def assert_run_by_the_engine(reports, backward_runs):
    for report in reports:
        counters = report["counters"]
        assert counters["fallbacks"] == 0, counters
        assert counters["backward_runs"] == backward_runs, counters


@pytest.mark.parametrize("stage", ["0", "1", "2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_that_divide_no_parameters(run, stage, dtype):
    script = """
    stage, dtype = int(sys.argv[3]), getattr(torch, sys.argv[4])
    report(
        eager=train(start(stage, plain, plain, dtype), dtype=dtype),
        ours=train(start(stage, plain, torch_ort.ORTModule, dtype), dtype=dtype),
    )
    """
    # In bfloat16 PyTorch's own kernels run, whose results are eager's to the bit.
    kernels = {"TORCH_ORT_DISABLE": "own_kernels"} if dtype == "bfloat16" else {}
    reports = run(script, stage, dtype, **kernels)
    assert_run_by_the_engine(reports, backward_runs=6)
    for report in reports:
        assert report["counters"]["graphs_captured"] == 1, report["counters"]


def test_parts_whose_parameters_stage_3_gathers_around_them(run):
    script = """
    def leaves(wrap):
        engine = start(3, wrap, lambda model: deepspeed.utils.set_z3_leaf_modules(model, [Block])
                       and model)
        return train(engine)

    report(eager=leaves(plain), ours=leaves(torch_ort.ORTModule))
    """
    assert_run_by_the_engine(run(script), backward_runs=12)


def test_stage_3_with_several_calls_before_a_backward(run):
    script = """
    def twice(wrap):
        def wrap_last(model):
            model[3] = wrap(model[3])  # its parameters are its own: there is nothing to name
            return model

        return train(start(3, plain, wrap_last), calls=2)

    report(eager=twice(plain), ours=twice(torch_ort.ORTModule))
    """
    assert_run_by_the_engine(run(script), backward_runs=12)


def test_a_module_in_which_stage_3_gathers_parameters_runs_in_pytorch(run):
    script = """
    import warnings

    from torch_ort.fallback import FallbackWarning

    eager = train(start(3, plain, plain))
    engine = start(3, plain, torch_ort.ORTModule)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = train(engine)
    words = [str(w.message) for w in seen if w.category is FallbackWarning]
    report(eager=eager, ours=ours, words=words)
    """
    for report in run(script, TORCH_ORT_STRICT="0"):
        assert report["counters"]["fallbacks"] == 1
        (words,) = report["words"]
        assert "DeepSpeed's ZeRO stage 3 gathers the parameters of module '0' around" in words
        assert "set_z3_leaf_modules" in words


@pytest.mark.parametrize("stage", ["1", "2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checks_in_one_pass_find_what_those_of_deepspeed_find(tmp_path, stage, dtype):
    pytest.importorskip("deepspeed")
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
