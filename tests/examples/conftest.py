# The examples as a user runs them: their main functions, or a process of their own.
from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from small_run import EXAMPLES, write_small_text


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a script by its path below examples/."""

    def load(script: str) -> ModuleType:
        path = EXAMPLES / script
        monkeypatch.syspath_prepend(str(path.parent))
        return importlib.import_module(path.stem)

    return load


@pytest.fixture
def engine(backend: str) -> str:
    """Return the backend under test, if it is built."""
    if backend == "ort":
        pytest.importorskip("torch_ort._C")
    return backend


@pytest.fixture(params=["eager", "compiled"])
def each_backend(request: pytest.FixtureRequest) -> str:
    """Return eager, then the backend under test."""
    return "eager" if request.param == "eager" else request.getfixturevalue("engine")


@pytest.fixture
def small_text(tmp_path: Path) -> Path:
    return write_small_text(tmp_path / "text")


@pytest.fixture
def run_transformer(
    load_example: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict]:
    """Return a function that runs train_transformer in an empty folder and returns its losses."""
    monkeypatch.chdir(tmp_path)
    program = load_example("train_transformer.py")

    def run(*arguments: object, status: int = 0) -> dict:
        assert program.main(["--losses", "losses.json", *map(str, arguments)]) == status
        return json.loads(Path("losses.json").read_text())

    return run


@pytest.fixture
def start_script(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Return a function that starts a script in a process of its own, in an empty folder."""

    def start(script: str, *arguments: object) -> subprocess.Popen:
        # Tests that run in the background of a shell are told to ignore Ctrl-C, and so are their
        # children.
        return subprocess.Popen(
            [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return start
