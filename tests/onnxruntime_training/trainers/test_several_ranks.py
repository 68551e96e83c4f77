"""Both ORTTrainers on several ranks: averaged gradients, sharded state, launchers, checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import run_script

from torch_ort import UserError
from torch_ort.onnxruntime_training.trainers import ranks
from torch_ort.options import launched

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

# Trains on each rank's part of the batches, or in one process on all of them; `sys.argv[3]` is the
# generation, [4] the stage of ZeRO, [5] the optimizer, [6] the number of ranks.
SCRIPT = """
    import sys
    import torch
    import torch.nn.functional as F
    import torch_ort
    from torch_ort.optim import AdamConfig, LambConfig
    from torch_ort.trainers import v0
    from torch_ort.trainers.v1 import ORTTrainer, ORTTrainerOptions

    rank, folder, generation, stage, name, world_size = sys.argv[1:]
    rank, stage, world_size = int(rank), int(stage), int(world_size)
    torch.set_num_threads(1)

    def make(seed=0, stage=stage):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )
        if generation == "v0":
            desc = v0.ModelDescription(
                [v0.IODescription("x", ["batch", 6]), v0.IODescription("label", ["batch"])],
                [v0.IODescription("loss", []), v0.IODescription("logits", ["batch", 3])],
            )
            return v0.ORTTrainer(
                model, F.cross_entropy, desc, name, lambda _: {"lambda": 0.1}, None, "cpu",
                gradient_accumulation_steps=2, world_rank=rank, world_size=world_size,
                get_lr_this_step=lambda step: 0.1 / (1 + step), deepspeed_zero_stage=stage,
            )
        desc = {
            "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
            "outputs": [("loss", [], True), ("logits", ["batch", 3])],
        }
        config = {"AdamOptimizer": AdamConfig, "LambOptimizer": LambConfig}[name]
        options = {
            "device": {"id": "cpu"},
            "batch": {"gradient_accumulation_steps": 2},
            "distributed": {
                "world_rank": rank, "world_size": world_size,
                "deepspeed_zero_optimization": {"stage": stage},
            },
        }
        return ORTTrainer(
            model, desc, config(lr=0.1, lambda_coef=0.1), F.cross_entropy,
            ORTTrainerOptions(options),
        )

    def train(trainer, first, last):
        numbers = torch.Generator().manual_seed(1)
        for i in range(last):
            x = torch.randn(8, 6, generator=numbers)
            y = torch.randint(3, (8,), generator=numbers)
            if i >= first:
                trainer.train_step(x[rank::world_size], y[rank::world_size])

    def weights(trainer):
        return trainer.state_dict(False) if generation == "v0" else trainer.state_dict(True)

    def save(trainer):
        if generation == "v0":
            v0.save_checkpoint(trainer, folder, "run", {"epoch": 4})
        else:
            trainer.save_checkpoint(f"{folder}/part_{rank}")

    def load(trainer):
        if generation == "v0":
            return v0.load_checkpoint(trainer, folder, "run", strict=True)
        paths = [f"{folder}/part_{it}" for it in range(world_size)]
        return trainer.load_checkpoint(*paths)

    def held(trainer):
        state = trainer.state_dict()
        if generation == "v0":
            return sorted(it[9:] for it in state if it.startswith("Moment_1_"))
        return sorted(state["optimizer"])
"""
TRAIN = """
    import torch.distributed as dist

    through = make()
    train(through, 0, 4)
    save(through)
    if world_size > 1:
        dist.barrier()
    again = make(seed=5)
    kept = load(again)
    train(through, 4, 8)
    train(again, 4, 8)
    found = {
        "weights": weights(through), "resumed": weights(again), "held": held(through),
        "kept": kept, "fallbacks": torch_ort.counters()["fallbacks"],
    }
    torch.save(found, f"{folder}/rank_{rank}.pt")
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
"""


def script(text):
    return SCRIPT + text


def address():
    """Give where the ranks of a test meet, as torchrun tells it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize(
    ("generation", "name", "stage"),
    [
        ("v0", "AdamOptimizer", 1),
        ("v1", "LambOptimizer", 0),
        pytest.param("v0", "AdamOptimizer", 0, marks=pytest.mark.slow),
        pytest.param("v1", "LambOptimizer", 1, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one(generation, name, stage, tmp_path):
    arguments = (generation, str(stage), name)
    alone = tmp_path / "alone"
    alone.mkdir()
    (one,) = run_script(script(TRAIN), alone, *arguments, "1")
    both = run_script(script(TRAIN), tmp_path, *arguments, "2", ranks=2, **address())
    for found in both:
        torch.testing.assert_close(found["weights"], one["weights"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found["weights"], both[0]["weights"], rtol=0, atol=0)
        torch.testing.assert_close(found["resumed"], found["weights"], rtol=0, atol=0)
        assert found["fallbacks"] == 0
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    held = [found["held"] for found in both]
    if stage == 0:
        assert held == [names, names]
    else:
        assert sorted(held[0] + held[1]) == names
        assert all(held)
    if generation == "v0":
        files = sorted(it.name for it in tmp_path.glob("run*"))
        parts = ["run.ZeRO.0.1.ort.pt", "run.ZeRO.1.1.ort.pt"]
        assert files == (parts if stage == 1 else ["run.ort.pt"])
        assert [found["kept"] for found in both] == [{"epoch": 4}] * 2


SAVE = """
    trainer = make()
    train(trainer, 0, 4)
    save(trainer)
    import torch.distributed as dist
    torch.save(weights(trainer), f"{folder}/rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
"""
GO_ON = """
    import warnings
    trainer = make(seed=3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        v0.load_checkpoint(trainer, folder, "run", strict=True)
    loaded = weights(trainer)
    train(trainer, 4, 8)
    words = [str(it.message) for it in told if "put together" in str(it.message)]
    torch.save([loaded, weights(trainer), held(trainer), words], f"{folder}/rank_0.pt")
"""


def test_parts_of_ranks_go_on_in_one_process(tmp_path):
    arguments = ("v0", "1", "AdamOptimizer")
    first, _ = run_script(script(SAVE), tmp_path, *arguments, "2", ranks=2, **address())
    ((loaded, trained, held, words),) = run_script(script(GO_ON), tmp_path, *arguments, "1")
    torch.testing.assert_close(loaded, first, rtol=0, atol=0)
    assert len(held) == 4
    assert words == [f"{tmp_path}: 2 files run.ZeRO.*.1.ort.pt are put together"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (one,) = run_script(script(TRAIN), alone, *arguments, "1")
    torch.testing.assert_close(trained, one["weights"], rtol=1e-4, atol=1e-6)


BETWEEN = """
    trainer = make()
    train(trainer, 0, 1)
    try:
        trainer.state_dict()
    except RuntimeError as error:
        words = str(error)
    import torch.distributed as dist
    torch.save(words, f"{folder}/rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
"""


def test_no_state_between_two_updates_of_ranks(tmp_path):
    arguments = ("v1", "0", "AdamOptimizer", "2")
    for words in run_script(script(BETWEEN), tmp_path, *arguments, ranks=2, **address()):
        assert words.startswith("state_dict: got gradients that ranks have not exchanged yet")


LAUNCHERS = [
    ({}, (0, 1, 1, False)),
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (1, 4, 2, False)),
    ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, (1, 4, 0, True)),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
     (3, 4, 4, False)),
    ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, (0, 2, 2, False)),
]  # fmt: skip


@pytest.fixture
def launcher(monkeypatch):
    """Return a function that makes an environment a launcher's."""
    names = {name for found, _ in LAUNCHERS for name in found}

    def set_environment(variables):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_environment({})
    return set_environment


@pytest.mark.parametrize(("variables", "want"), LAUNCHERS)
def test_environments_of_launchers(launcher, variables, want):
    launcher(variables)
    found = launched()
    assert (found.rank, found.world_size, found.num_local, found.has_address) == want


def test_an_environment_that_is_wrong(launcher):
    launcher({"RANK": "one", "WORLD_SIZE": "4"})
    with pytest.raises(UserError, match="environment: RANK: got 'one', want a whole number"):
        launched()


def test_ranks_that_cannot_be_reached(launcher):
    words = "world_size: got 4, but neither a process group nor its address; start with `torchrun"
    with pytest.raises(RuntimeError, match=words):
        ranks.join(0, 4, torch.device("cpu"))
    launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
              "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})  # fmt: skip
    with pytest.raises(RuntimeError, match=words):
        ranks.join(1, 4, torch.device("cpu"))


def test_a_launcher_that_the_script_does_not_ask(launcher):
    launcher({"RANK": "1", "WORLD_SIZE": "4"})
    words = "world_size: got 1, but a launcher has started 4 ranks: each trains alone; pass world_"
    with pytest.warns(UserWarning, match=words):
        ranks.join(0, 1, torch.device("cpu"))


def test_mpirun_on_one_machine_needs_no_address(launcher, monkeypatch):
    launcher(LAUNCHERS[3][0])
    made = {}

    def init(backend, **settings):
        made.update(settings, backend=backend)

    monkeypatch.setattr(dist, "init_process_group", init)
    ranks.join(3, 4, torch.device("cpu"))
    assert made == {
        "backend": "gloo", "init_method": "tcp://127.0.0.1:29500", "rank": 3, "world_size": 4,
    }  # fmt: skip
    ranks.join(3, 4, torch.device("cuda"))
    assert made["backend"] == "nccl"


def test_numbers_that_are_not_those_of_the_group(launcher, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        words = "world_rank, world_size: got 1, 2, want those of torch.distributed, 0, 1"
        with pytest.raises(ValueError, match=words):
            ranks.join(1, 2, torch.device("cpu"))
        ranks.join(0, 1, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
