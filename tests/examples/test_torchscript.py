# The TorchScript example: both ways of training agree, and the saved script works.
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("sklearn")


@pytest.fixture
def program(
    load_example: Callable, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    if engine != "ort":
        pytest.skip("torchscript.py names its backend")
    monkeypatch.chdir(tmp_path)
    return load_example("torchscript.py")


def test_the_engine_trains_the_script(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert program.main(["--epochs", "2"]) == 0
    out = capsys.readouterr().out
    losses = re.findall(r"loss ([\d.]+) to ([\d.]+),.* 46 steps", out)
    assert len(losses) == 2
    interpreter, engine = ([float(text) for text in pair] for pair in losses)
    assert engine == pytest.approx(interpreter, rel=1e-2)
    assert float(re.search(r"digits\.pt: test accuracy ([\d.]+)%", out)[1]) > 80
    assert "engine: fallbacks 0," in out
    assert "forward_runs 46" in out
    served = torch.jit.load(tmp_path / "digits.pt")
    with pytest.raises(torch.jit.Error, match="want images of four dims, got 2"):
        served(torch.ones(8, 8))


def test_a_missing_folder_is_named(program: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        program.main(["--output", "nowhere/digits.pt"])
    assert "--output: no such folder" in capsys.readouterr().err
