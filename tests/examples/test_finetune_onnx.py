# The example that fine-tunes an ONNX file: what it learns, by either backend, and its files.
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_ort

pytest.importorskip("sklearn")


@pytest.fixture
def run(
    load_example: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    program = load_example("finetune_onnx.py")

    def run(*arguments: str) -> str:
        assert program.main(arguments) == 0
        return capsys.readouterr().out

    return run


def accuracies(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([\d.]+)%", out)]


def test_learns_and_writes_what_onnxruntime_runs(run: Callable[..., str]) -> None:
    out = run("--epochs", "3")
    of_file, before, after, in_onnxruntime = accuracies(out)
    assert of_file > 90
    assert before < 50
    assert after > 85
    assert in_onnxruntime == after
    assert "engine: fallbacks 0," in out
    assert torch_ort.counters()["fallbacks"] == 0


def test_a_part_is_trained_as_in_eager(run: Callable[..., str]) -> None:
    outs = [
        run("--epochs", "2", "--trainable", "classifier.*", "--backend", backend)
        for backend in ("ort", "eager")
    ]
    for out in outs:
        assert "training 2,570 numbers of classifier.2.weight, classifier.2.bias\n" in out
    ours, eager = (
        [float(x) for x in re.findall(r"loss ([\d.]+) to ([\d.]+)", out)[0]] for out in outs
    )
    assert ours == pytest.approx(eager, rel=1e-3)


def test_a_pattern_that_matches_nothing(run: Callable[..., str]) -> None:
    with pytest.raises(torch_ort.UserError, match=r"'head\.\*' matches no weight; there are class"):
        run("--epochs", "1", "--trainable", "head.*")
