# The examples of several processes: eager's losses, and steps that a killed process does not lose.
from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from own_process import run_python
from small_run import EXAMPLES

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

# Tests that need it do not import it here, which takes seconds.
needs_deepspeed = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
# Graphs that run at each step. Of fsdp.py each of two layers is one; under ZeRO stage 3 they are
# the layers, the embedding, the positions and the decoder.
GRAPHS = {"ddp.py": 1, "fsdp.py": 2, "deepspeed_zero.py": 5}
SMALL = ("--width", "32", "--words", "20000", "--batch-size", "4")


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a script in two processes; gives what they print."""

    def run(script: Path, *arguments: object, restarts: int = 0) -> str:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", "2", "--max-restarts", str(restarts)]
        done = subprocess.run(
            [*launcher, script, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=540,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


def losses_of(path: Path) -> list[float]:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("script", "backend"),
    [
        ("ddp.py", "ort"),
        ("fsdp.py", "ort"),
        pytest.param("deepspeed_zero.py", "ortmodule", marks=needs_deepspeed),
        pytest.param("ddp.py", "ortmodule", marks=pytest.mark.slow),
        pytest.param("fsdp.py", "ortmodule", marks=pytest.mark.slow),
    ],
)
def test_losses_of_eager(script: str, backend: str, torchrun: Callable, tmp_path: Path) -> None:
    printed = {}
    for name in ("eager", backend):
        arguments = (*SMALL, "--steps", 6, "--backend", name, "--losses", f"{name}.json")
        printed[name] = torchrun(EXAMPLES / script, *arguments)
    want = losses_of(tmp_path / "eager.json")
    assert len(want) == 6
    assert losses_of(tmp_path / f"{backend}.json") == pytest.approx(want, rel=1e-4)
    calls = 6 * GRAPHS[script]
    assert re.search("engine: fallbacks 0, .*graphs_captured [125],", printed[backend])
    assert f"backward_runs {calls}, " in printed[backend]
    assert f"forward_runs {calls}, " in printed[backend]
    assert "engine:" not in printed["eager"]


def test_the_saved_model_is_whole(torchrun: Callable, tmp_path: Path) -> None:
    import torch

    torchrun(EXAMPLES / "fsdp.py", *SMALL, "--steps", 1, "--save", "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["encoder.layers.0.linear1.weight"].shape == (32, 32)
    assert all(type(value) is torch.Tensor for value in state.values())


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize(("stage", "backend"), [(1, "ort"), (3, "ortmodule")])
def test_deepspeed_goes_on_from_a_checkpoint(
    stage: int, backend: str, torchrun: Callable, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")

    def run(steps: int, folder: str) -> str:
        arguments = (*SMALL, "--backend", backend, "--stage", stage, "--steps", steps)
        files = ("--checkpoint", folder, "--every", 3, "--losses", f"{folder}.json")
        return torchrun(EXAMPLES / "deepspeed_zero.py", *arguments, *files)

    run(6, "whole")
    run(3, "parted")
    assert "goes on after step 3" in run(6, "parted")
    assert losses_of(tmp_path / "parted.json") == losses_of(tmp_path / "whole.json")[3:]


@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py", "deepspeed_zero.py"])
def test_without_torchrun(
    script: str, load_example: Callable, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        load_example(script).main([])
    assert stopped.value.code == 2
    assert "start it with torchrun --nproc-per-node 2" in capsys.readouterr().err


LEAVES = """
    import atexit, sys
    sys.path.insert(0, {examples!r})
    import ranks

    class Last:
        def __del__(self):
            print("taken apart")

    last = Last()
    atexit.register(print, "at exit")
    ranks.leave(3)
"""


def test_leaving_runs_what_is_registered_and_takes_nothing_apart() -> None:
    script = textwrap.dedent(LEAVES).format(examples=str(EXAMPLES))
    done = run_python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (3, "at exit\n", "")


# Its second process dies in the midst of the eighth step, in the first life of the run.
KILLED = """
    import os, signal, sys
    sys.path.insert(0, {examples!r})
    import ddp, ranks

    train_step = ranks.train_step

    def dies(model, optimizer, text, step):
        is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first_life and os.environ["RANK"] == "1" and step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        with open("steps_of_rank_" + os.environ["RANK"], "a") as file:
            file.write(f"{{step}}\\n")
        return train_step(model, optimizer, text, step)

    ranks.train_step = dies
    ranks.leave(ddp.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ort", "ortmodule"])
def test_a_killed_process_costs_no_step_before_the_last_checkpoint(
    backend: str, torchrun: Callable, tmp_path: Path
) -> None:
    arguments = (*SMALL, "--steps", 12, "--every", 3, "--backend", backend)
    torchrun(EXAMPLES / "ddp.py", *arguments, "--losses", "whole.json")
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED).format(examples=str(EXAMPLES)))
    files = ("--losses", "killed.json", "--checkpoint", "last.pt")
    out = torchrun(script, *arguments, *files, restarts=1)
    assert "goes on after step 6" in out
    steps = [int(line) for line in (tmp_path / "steps_of_rank_1").read_text().split()]
    assert steps == [*range(7), *range(6, 12)]
    whole, after = losses_of(tmp_path / "whole.json"), losses_of(tmp_path / "killed.json")
    assert after == pytest.approx(whole[6:], rel=1e-6)
