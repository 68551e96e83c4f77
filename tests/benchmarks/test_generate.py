"""The benchmark of `generate` runs, and makes eager's tokens. Nothing here depends on speed."""

from pathlib import Path

import pytest
from forked_process import OURS, run_fork

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "generate.py"
WITH_TRANSFORMERS = (*OURS, "transformers")


@pytest.mark.hf
def test_all_caches() -> None:
    pytest.importorskip("transformers")
    done = run_fork(
        SCRIPT, "--backends", "ort", "--rounds", "1", "--tokens", "3", "--threads", "1",
        imports=WITH_TRANSFORMERS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a token of small, 1 thread(s)" in done.stdout
    assert "fallbacks 0, frames_left_to_eager 0, calls_left_to_eager 0" in done.stdout
    for cache in ("dynamic", "static"):
        (row,) = (
            line for line in done.stdout.splitlines() if f"│ {cache} " in line and "│ ort " in line
        )
        assert row.rstrip(" │").endswith("yes")


def test_texts_that_the_model_cannot_hold_are_refused() -> None:
    pytest.importorskip("transformers")
    done = run_fork(SCRIPT, "--tokens", "500", imports=WITH_TRANSFORMERS)
    assert done.returncode == 2
    assert "the texts get longer than the model's positions" in done.stderr
