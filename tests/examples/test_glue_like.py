# The example of rows that count: its table, what it says is left out, its picture, wrong options.
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = (
    *("--steps", "3", "--batch-size", "8", "--length", "16", "--vocabulary", "60"),
    *("--width", "16", "--heads", "2", "--blocks", "2", "--threads", "1"),
)


@pytest.mark.ort_only
def test_shows_density_rows_time_and_memory(
    load_example: Callable, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    program = load_example("glue_like.py")
    picture = tmp_path / "rows.png"
    assert program.main([*SMALL, "--plot", str(picture)]) == 0
    out = capfd.readouterr().out
    assert out.startswith(">>>Valid token/label density (e.g. valid/total) in passing 10 steps:\n")
    densities = re.findall(r"\| EMBED +\| input_ids +\| 0 +\| ([\d.]+) +% \|", out)
    assert len(densities) == 5
    assert all(5 < float(density) < 60 for density in densities)
    assert len(re.findall(r"\| LABEL +\| labels +\| -100 +\| 100.00 +% \|", out)) == 5
    # Of the first batch: its words, and one place of each text.
    assert re.search(rf"rows computed: \d+ of 128 \({densities[0]}%\), chosen by the keys", out)
    assert "rows computed: 8 of 128 (6.25%), chosen by place 0 of each sequence" in out
    assert "engine: fallbacks 0," in out
    losses = dict(
        re.findall(r"^(eager|all rows|rows that count) .* loss ([\d.]+) after 3", out, re.M)
    )
    assert losses.keys() == {"eager", "all rows", "rows that count"}
    assert float(losses["all rows"]) == pytest.approx(float(losses["rows that count"]), abs=1e-3)
    assert re.search(r"a step takes [\d.]+ of the time and [\d.]+ of the memory\n", out)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--density 2", "--density: got 2, want at most 1"),
        ("--density 0", "argument --density: got '0', want a number above 0"),
        ("--width 30", "--width: got 30, want a multiple of 4 heads"),
        ("--steps 1", "argument --steps: got '1', want a whole number, at least 2"),
        ("--plot rows.txt", "--plot: got rows.txt, want a name that ends in .png"),
        ("--plot nowhere/rows.png", "--plot: no such folder: "),
        ("--blockz 2", "unknown option: --blockz, did you mean --blocks?"),
    ],
)
def test_wrong_options(
    load_example: Callable, arguments: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_example("glue_like.py").main(arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
