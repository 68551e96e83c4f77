"""What a step of the benchmarks' models costs, as far as no clock is needed to tell.

`pytest --accept tests/benchmarks/test_counts.py` writes counts.json anew; the reviewer reads the
difference in the commit that has caused it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from own_process import run_python

from torch_ort import _C

KEPT = Path(__file__).with_name("counts.json")
SCRIPT = Path(__file__).with_name("counting.py")
MODELS = ("mlp", "lm_d64", "cnn", "bert", "vit", "llama", "unet", "recommender")
# One road through all libraries, whatever the processor and its number of cores.
FIXED = {
    "TORCH_ORT_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_ORT_STRICT": "1",
}  # fmt: skip


def counts() -> dict[str, dict[str, int]]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH_ORT_", "ORTMODULE_"))
    }
    done = run_python(SCRIPT, *MODELS, env=kept | FIXED)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def written(found: dict[str, dict[str, int]]) -> str:
    """Give a line for each model, so that a difference shows which of them has changed."""
    lines = [f' "{name}": {json.dumps(each)}' for name, each in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@pytest.mark.skipif("avx2" not in _C.isa_names(), reason="the counts are those of AVX2")
def test_counts_are_those_of_the_file(request: pytest.FixtureRequest) -> None:
    found = counts()
    if request.config.getoption("--accept"):
        KEPT.write_text(written(found))
    assert written(found) == KEPT.read_text(), f"{KEPT.name} differs: --accept writes it anew"
