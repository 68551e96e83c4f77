# The example of Hugging Face's Trainer, on each road.
from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_process import run_fork
from processes import WITH_TRAINER
from small_run import EXAMPLES

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.hf


def test_trains_as_eager_does(tmp_path: Path) -> None:
    small = ("--steps", 4, "--batch-size", 4, "--length", 32)
    losses = {}
    for road in ("eager", "module", "ort"):
        done = run_fork(
            EXAMPLES / "hf_trainer.py", *small, "--road", road, "--save", road,
            imports=WITH_TRAINER, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        out = done.stdout
        losses[road] = float(re.search(r"evaluation loss ([\d.]+)", out).group(1))
        assert "it writes: 'The king" in out
        runs = int(re.search(r"backward (\d+)", out).group(1))
        assert runs == 0 if road == "eager" else runs >= 4
        assert "fallbacks 0" in out
        assert (tmp_path / road / "model.safetensors").is_file()
    # Dropout draws other masks in the engine.
    assert losses["module"] == pytest.approx(losses["eager"], abs=0.1)
    assert losses["ort"] == pytest.approx(losses["eager"], abs=0.1)
