# The example of custom Functions: one graph each for ORTModule and torch.compile, eager's losses.
from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


def test_losses_of_eager_in_one_graph(
    load_example: Callable, capsys: pytest.CaptureFixture
) -> None:
    program = load_example("custom_autograd.py")
    assert program.main(["--steps", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "engine: 2 graphs, 240 calls of Functions, fallbacks 0" in lines
    difference = float(lines[-1].rpartition(" ")[2])
    assert difference < 1e-4
