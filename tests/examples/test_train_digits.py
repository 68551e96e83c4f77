# The convolutional example: its numbers against eager's, and what it learns.
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sklearn")


@pytest.fixture
def run_digits(
    load_example: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict]:
    monkeypatch.chdir(tmp_path)
    program = load_example("train_digits.py")

    def run(*arguments: object) -> dict:
        assert program.main([*map(str, arguments), "--losses", "losses.json"]) == 0
        return json.loads(Path("losses.json").read_text())

    return run


def test_learns_with_the_losses_of_eager(
    run_digits: Callable, engine: str, capsys: pytest.CaptureFixture
) -> None:
    want = run_digits("--backend", "eager", "--epochs", 3)
    got = run_digits("--backend", engine, "--epochs", 3)
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-3)
    assert got["accuracy"] > 0.9
    out = capsys.readouterr().out
    assert "test accuracy" in out
    if engine == "ort":
        assert "engine: fallbacks 0," in out


def test_max_steps(run_digits: Callable) -> None:
    assert len(run_digits("--backend", "eager", "--max-steps", 30)["losses"]) == 30


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("--backend tensorrt", 2, "argument --backend: invalid choice: 'tensorrt'"),
        ("--step 4", 2, "unknown option: --step"),
        ("--batch-size 1", 2, "argument --batch-size: got '1', want a whole number, at least 2"),
        ("--lr 1e35", 1, "training stops"),
    ],
)
def test_bad_input(
    run_digits: Callable, capsys: pytest.CaptureFixture, arguments: str, status: int, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_digits("--backend", "eager", *arguments.split())
    assert stopped.value.code == status
    assert message in capsys.readouterr().err
