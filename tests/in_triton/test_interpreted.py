"""Kernels of Triton by its interpreter, which has to be asked for before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ort
from torch_ort.triton import printer, writer

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    """Some hundred regions and models, about a minute."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    file = Path(__file__).parent / "in_interpreter.py"
    # A power of float64 with 188 digits before the point is 1 % worse than the table allows.
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-W", "ignore", "-p", "no:xdist",
               "-p", "no:cacheprovider", "-k", "not (special_values and Pow-double)"]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_each_word_is_known():
    words = (Path(__file__).parents[2] / "csrc" / "ops" / "words.h").read_text()
    assert set(re.findall(r"^  WORD\((\w+),", words, re.MULTILINE)) == printer.WORDS


@pytest.mark.parametrize("is_installed", [False, pytest.param(True, marks=needs_triton)])
def test_a_machine_without_triton_says_so_once(is_installed, monkeypatch, caplog):
    if not is_installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(writer, "_said", set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    x = torch.randn(4, 6)
    for size in (4, 5):
        got = torch.compile(lambda x: x.sin().cos() + size, backend="ort")(x)  # noqa: B023
        torch.testing.assert_close(got, x.sin().cos() + size)
    why = {
        False: "the package triton is not installed",
        True: "on the CPU, Triton needs its interpreter (TRITON_INTERPRET=1)",
    }[is_installed]
    lines = [each.message for each in caplog.records if each.name == "torch_ort.triton"]
    assert lines == [f"ORTMODULE_USE_TRITON: {why}; the engine's own kernels run"]


def test_a_configuration_that_cannot_be_read_is_the_users_error(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    monkeypatch.setenv("ORTMODULE_TRITON_CONFIG_FILE", str(tmp_path / "none.json"))
    with pytest.raises(torch_ort.UserError, match=r"none\.json: No such file"):
        torch_ort.ORTModule(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU()))(
            torch.randn(2, 3)
        )
