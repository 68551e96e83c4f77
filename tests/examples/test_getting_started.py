# The short trio: one line of difference, and the same numbers.
from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import pytest
from small_run import EXAMPLES

FOLDER = EXAMPLES / "getting_started"


def test_one_line_makes_the_difference() -> None:
    plain, ours = (
        (FOLDER / name).read_text().splitlines() for name in ("train.py", "train_ort.py")
    )
    changed = [line for line in difflib.ndiff(plain, ours) if line[0] in "+-"]
    assert changed == ['+     model = torch.compile(model, backend="ort")']
    assert len([line for line in plain if line.strip()]) < 80


def test_both_print_the_same_numbers(
    load_example: Callable,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    if engine != "ort":
        pytest.skip("train_ort.py names its backend")
    printed = {}
    for name in ("train", "train_ort"):
        program = load_example(f"getting_started/{name}.py")
        plays = program.read_splits()
        small = plays._replace(
            train=plays.train[:20_000], valid=plays.valid[:4_000], test=plays.test[:4_000]
        )
        monkeypatch.setattr(program, "read_splits", lambda small=small: small)
        monkeypatch.setattr(program, "EPOCHS", 2)
        program.main()
        figures = re.findall(r"(?:loss|perplexity) ([\d.]+)", capsys.readouterr().out)
        printed[name] = [float(figure) for figure in figures]
    assert len(printed["train"]) == 5
    # The perplexity of a model that has hardly begun to learn: a thousandth of the loss is a
    # hundredth of it.
    assert printed["train_ort"] == pytest.approx(printed["train"], rel=2e-2)
