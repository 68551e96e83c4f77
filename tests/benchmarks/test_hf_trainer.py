"""The training run by Hugging Face's Trainer: what its sides do, and what is said of them."""

from __future__ import annotations

import io
import json

import pytest
import torch


@pytest.fixture
def script(load_script, monkeypatch):
    load_script("targets")  # which it imports
    module = load_script("hf_trainer")
    monkeypatch.setattr(module, "WIDTH", 16)
    monkeypatch.setattr(module, "LENGTH", 24)
    return module


def options_of(script, *more: str):
    return script.parse_arguments(["--steps=4", "--windows=2", "--batch-size=2", *more])


@pytest.mark.hf
@pytest.mark.parametrize("road", ["eager", "module"])
def test_the_loop_does_what_the_trainer_does(script, road):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options, curves = options_of(script), {}
    for name in ("loop", "Trainer"):
        side, answers = script.Side(name, road, 3), io.StringIO()
        turns = script.Turns(2, side.seed, io.StringIO("\n" * 2), answers)
        train = script.train_by_loop if name == "loop" else script.train_by_trainer
        curves[name] = train(side, options, turns)
        turns.end()
        assert [[*json.loads(line)] for line in answers.getvalue().splitlines()] == [
            ["seconds"]
        ] * 2
    assert len(curves["loop"]) == 2
    assert curves["Trainer"] == pytest.approx(curves["loop"], rel=1e-6)


def test_pieces_are_those_of_the_seed(script):
    first, again, other = (script.Pieces(5, seed) for seed in (0, 0, 1))
    assert len(first) == 5
    assert torch.equal(first[4]["input_ids"], again[4]["labels"])
    assert first.starts != other.starts
    assert first[0]["input_ids"].shape == (24,)


def sides_of(script, trainer: float, apart: float, fallbacks: int = 0):
    counters = {"fallbacks": fallbacks, "graph_breaks": 0}
    return [
        script.Side("loop", "eager", 0, [2.0, 2.0], [5.0, 4.0], counters),
        script.Side("loop", "eager", 1, [2.0, 2.0], [5.1, 4.1], counters),
        script.Side("loop", "module", 0, [1.0, 1.0], [5.0, 4.0], counters),
        script.Side("Trainer", "module", 0, [trainer] * 2, [5.0, 4.0 + apart], counters),
    ]


def test_verdicts(script):
    met = script.verdicts(sides_of(script, 1.02, 0.1), ["module"])
    assert met == [
        "Trainer against the same loop, module: met (0.980, want ≥ 0.97)",
        "curve of Trainer, module, seed 0: met (0.0500 from eager's, want ≤ 0.1000, which eager's "
        "own are apart)",
        "curve of loop, module, seed 0: met (0.0000 from eager's, want ≤ 0.1000, which eager's own "
        "are apart)",
    ]
    slow, far, _ = script.verdicts(sides_of(script, 1.05, 0.3), ["module"])
    assert "missed (0.952" in slow
    assert "missed (0.1500" in far
    _, in_eager, _ = script.verdicts(sides_of(script, 1.0, 0.0, fallbacks=1), ["module"])
    assert "missed, not all in the engine" in in_eager


def test_the_table_has_all_sides(script):
    table = script.table(sides_of(script, 1.0, 0.0), options_of(script))
    assert table.row_count == 4
    assert "4 steps of 2 samples" in table.title


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds=1"], "--seeds: got 1, want 2 or more"),
        (["--steps=30"], "--steps: got 30, want a multiple of 20 windows"),
        (["--steps=120", "--turn-steps=50"], "--steps: got 120, want a multiple of 50 steps"),
    ],
)
def test_wrong_numbers_are_refused(script, arguments, words, capsys):
    with pytest.raises(SystemExit):
        script.parse_arguments(arguments)
    assert words in capsys.readouterr().err
