# The trainer of ONNX Runtime Training on a small text: it learns, resumes and writes ONNX.
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch

import torch_ort

pytestmark = pytest.mark.ort_only


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", text)]


@pytest.fixture
def run(load_example: Callable, small_text: Path, tmp_path: Path, capsys) -> Callable:
    """Return a function that runs the script in an empty folder and gives the losses it prints."""
    program = load_example("ort_trainer.py")

    def call(name: str, *arguments: object) -> list[float]:
        where = ("--data", small_text, "--checkpoint", tmp_path / f"{name}.pt")
        program.main([*map(str, (*where, *arguments))])
        return losses(capsys.readouterr().out)

    return call


def test_it_learns_and_resumes_and_writes_onnx(run: Callable, tmp_path: Path) -> None:
    first, *_, last, valid = run("whole", "--steps", 24, "--onnx", tmp_path / "model.onnx")
    assert last < first
    assert torch_ort.counters()["fallbacks"] == 0
    run("parts", "--steps", 24, "--stop", 11)
    resumed = run("parts", "--steps", 24, "--resume")
    assert resumed[-2:] == [last, valid]
    whole, parts = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "parts")
    )
    torch.testing.assert_close(parts["model"], whole["model"], rtol=0, atol=0)
    session = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    assert [it.name for it in session.get_inputs()] == ["words", "next_words"]
    assert [it.name for it in session.get_outputs()] == ["loss", "logits"]


def test_mixed_precision(run: Callable) -> None:
    first, *_, last, _ = run("mixed", "--steps", 8, "--mixed")
    assert last < first
