# The environment that `make test-arm64` makes, in which a Python for aarch64 runs under qemu.
from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARM64 = ROOT / "build" / "arm64"


@pytest.fixture
def run_emulated() -> Callable[..., str]:
    """Give a call that runs a program in the environment, and gives what it printed."""
    python = ARM64 / "bin" / "python"
    if not python.exists():
        pytest.skip("needs build/arm64: run `make test-arm64`")

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [python, "-c", program],
            # Not the checkout, whose package is for this machine.
            cwd=ARM64,
            env=os.environ | {"TORCH_ORT_STRICT": "1", "OMP_NUM_THREADS": "2"} | environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run
