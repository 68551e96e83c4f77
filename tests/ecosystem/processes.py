# Scripts of tests that run in processes of their own, one or several ranks.
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

# The last lines of a script of several ranks. Where PyTorch keeps a process group, its threads of
# gloo outlive it, and one that lets go of a tensor while Python ends aborts the process.
LEAVE = """
import os
os._exit(0)
"""


def run_script(
    script: str, folder: Path, *args: str, ranks: int = 1, timeout: int = 300, **environment: str
) -> list[Any]:
    """Run a script with its rank, a folder and `args`; give what each rank saved as rank_<n>.pt."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script) + (LEAVE if ranks > 1 else ""))
    started = [
        subprocess.Popen(
            [sys.executable, path, str(rank), str(folder), *args],
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            _, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, err[-4000:]
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(ranks)]
