"""The table of optimizers."""

from __future__ import annotations

import json
import math

import pytest


@pytest.fixture
def optimizers(load_script):
    load_script("targets")  # which it imports
    return load_script("optimizers")


def test_sizes_are_those_of_the_target(optimizers):
    of = optimizers.sizes()
    assert len(of) == 150
    assert sum(map(math.prod, of)) == pytest.approx(20e6, rel=0.01)


def test_a_table(optimizers, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(optimizers, "sizes", lambda width: [(3, 4), (5,)])
    file = tmp_path / "optimizers.json"
    arguments = ["--threads", "1", "--turns", "2", "--json", str(file)]
    assert optimizers.main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == list(optimizers.CASES)
    assert all(len(row["ours"]) == len(row["copy"]) == 2 for row in rows)
    assert [row["name"] for row in rows if not row["fused"]] == ["Lamb"]
    text = capsys.readouterr().out
    assert "2 tensors" in text
    assert "FusedAdam, mode 1 against PyTorch's fused:" in text


def test_some_of_them(optimizers, monkeypatch, capsys):
    monkeypatch.setattr(optimizers, "sizes", lambda width: [(3, 4)])
    assert optimizers.main(["--only", "SGD", "Lamb", "--threads", "1", "--turns", "2"]) == 0
    text = capsys.readouterr().out
    assert "SGD, momentum" in text
    assert "Lamb" in text
    assert "Adam," not in text


@pytest.mark.cuda
def test_on_a_gpu(optimizers, monkeypatch, capsys):
    monkeypatch.setattr(optimizers, "sizes", lambda width: [(width, 4)])
    arguments = ["--device", "cuda", "--width", "3", "--only", "FusedAdam", "--turns", "2"]
    assert optimizers.main(arguments) == 0
    assert "1 tensors, 0.0 million, cuda, threads: 1" in capsys.readouterr().out


def test_a_missed_target_is_told(optimizers):
    row = optimizers.Row("FusedAdam, mode 1", 1, [2.0, 2.2], [1.0, 1.0], [3.0, 3.0], [1.0, 1.0])
    assert optimizers.verdicts([row]) == [
        "FusedAdam, mode 1 against PyTorch's fused: missed (2.00, want ≤ 1.0)",
        "FusedAdam, mode 1 against a copy's speed: missed (0.50, want ≥ 0.9)",
    ]
