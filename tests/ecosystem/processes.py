# Scripts of tests that run in processes of their own, one or several ranks.
from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from forked_process import OURS, run_forks

# The last lines of a script of several ranks. Where PyTorch keeps a process group, its threads of
# gloo outlive it, and one that lets go of a tensor while Python ends aborts the process.
LEAVE = """
import os
os._exit(0)
"""
# What scripts of Hugging Face's libraries import, which takes seconds.
WITH_TRAINER = (*OURS, "accelerate", "transformers.trainer")


def run_script(
    script: str, folder: Path, *args: str, ranks: int = 1, timeout: int = 300,
    imports: Sequence[str] = OURS, **environment: str,
) -> list[Any]:  # fmt: skip
    """Run a script with its rank, a folder and `args`; give what each rank saved as rank_<n>.pt."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script) + (LEAVE if ranks > 1 else ""))
    done = run_forks(
        path, [[rank, folder, *args] for rank in range(ranks)], imports, timeout=timeout,
        env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
    )  # fmt: skip
    failures = [
        f"rank {rank}: {it.stderr[-4000:]}" for rank, it in enumerate(done) if it.returncode
    ]
    assert not failures, "\n".join(failures)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(ranks)]
