"""The smoke run and the profile of a step, which begin an hour on a GPU, on the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from forked_process import run_fork

from torch_ort import _C
from torch_ort.engine import compiler
from torch_ort.fallback import FallbackWarning

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_fork(Path("benchmarks", script), *arguments, cwd=ROOT, env=os.environ | variables)


@pytest.mark.parametrize("arguments", [("--dtype", "float32"), ("--check", "2")])
def test_the_engine_is_beside_eager(arguments):
    done = run("smoke.py", *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["step 0", "step 1", "step 2"]
    assert lines[3].startswith("forward_runs 3, backward_runs 3, steps_region ")
    assert lines[3].endswith("fallbacks 0, graph_breaks 0, frames_left_to_eager 0, "
                             "calls_left_to_eager 0")  # fmt: skip


@pytest.mark.hands_over("compilation fails")
def test_a_fallback_fails_and_is_named(monkeypatch, capsys, load_script):
    load_script("models")
    smoke = load_script("smoke")
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setattr(compiler, "_sessions", {})  # an equal graph of another test would be shared
    monkeypatch.setattr(compiler, "compile_session", _fail)
    with pytest.warns(FallbackWarning, match="planted"):
        assert smoke.main(["--steps", "1"]) == 1
    assert "smoke: fallbacks: 1, want 0" in capsys.readouterr().err


def _fail(*args, **kwargs):
    raise _C.InternalError("planted")


def test_a_profile_is_a_table():
    done = run(
        "profile_step.py", "--model", "mlp", "--backend", "ort", "--warm", "1", "--rows", "9"
    )
    assert done.returncode == 0, done.stderr
    assert "Self CPU time total" in done.stdout
