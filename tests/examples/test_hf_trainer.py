# The example of Hugging Face's Trainer, on each road.
from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.hf


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-4000:]
    return out


def test_trains_as_eager_does(start_script: Callable, tmp_path: Path) -> None:
    small = ("--steps", 4, "--batch-size", 4, "--length", 32)
    losses = {}
    for road in ("eager", "module", "ort"):
        out = finish(start_script("hf_trainer.py", *small, "--road", road, "--save", road))
        losses[road] = float(re.search(r"evaluation loss ([\d.]+)", out).group(1))
        assert "it writes: 'The king" in out
        runs = int(re.search(r"backward (\d+)", out).group(1))
        assert runs == 0 if road == "eager" else runs >= 4
        assert "fallbacks 0" in out
        assert (tmp_path / road / "model.safetensors").is_file()
    # Dropout draws other masks in the engine.
    assert losses["module"] == pytest.approx(losses["eager"], abs=0.1)
    assert losses["ort"] == pytest.approx(losses["eager"], abs=0.1)
