"""The Makefile's targets for other versions of PyTorch, with a make in place of those they call."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")

INNER = """#!/bin/sh
echo "inner $*" >> "$CALLS"
case "$*" in
  *" trial "*) for each; do
      case "$each" in RECORD=*) [ -n "$NO_RECORD" ] || echo record > "${each#*=}";; esac
    done
    exit "${STATUS:-0}";;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout of the Makefile, with scripts and a pip that say how they are called."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    say = "import os, sys\nopen(os.environ['CALLS'], 'a').write(' '.join(sys.argv) + '\\n')\n"
    # With the copy comes the Python of its environment, which writes the page.
    make = """
where = os.path.join(sys.argv[1], ".venv", "bin")
os.makedirs(where)
os.symlink(sys.executable, os.path.join(where, "python"))
"""
    for name, text in {"cmake/checkout.py": say + make, "tests/versions/page.py": say}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "inner").write_text(INNER)
    (tmp_path / "inner").chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
    calls = checkout / "calls"
    calls.write_text("")
    done = subprocess.run(
        ["make", "-C", checkout, f"MAKE={checkout / 'inner'}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | {"CALLS": str(calls), "VIRTUAL_ENV": "", "MAKEFLAGS": "", **variables},
    )
    return done.returncode, done.stdout, calls.read_text().splitlines()


@pytest.mark.parametrize("status", ["0", "1"])
def test_another_torch_is_tested_in_a_copy(checkout: Path, status: str) -> None:
    got, said, calls = run(checkout, "test-torch", "TORCH_SPEC=torch==9.1.2", STATUS=status)
    folder = checkout / "build" / "torch-9.1.2"
    settings = "VIRTUAL_ENV= TORCH_OLDEST=999 TORCH_SPEC=torch==9.1.2"
    assert calls == [
        f"cmake/checkout.py {folder}/checkout",
        f"inner -C {folder}/checkout {settings} trial RECORD={folder}/record.json",
        f"tests/versions/page.py {folder}/record.json",
    ], said
    # What has failed is on the page as well.
    assert (got != 0) is (status != "0")


def test_a_trial_that_does_not_end_changes_no_page(checkout: Path) -> None:
    (checkout / "build" / "torch-9.1.2").mkdir(parents=True)
    (checkout / "build" / "torch-9.1.2" / "record.json").write_text("of an earlier one")
    got, said, calls = run(
        checkout, "test-torch", "TORCH_SPEC=torch==9.1.2", STATUS="2", NO_RECORD="1"
    )
    assert got != 0, said
    assert [call for call in calls if "page.py" in call] == []


@pytest.mark.parametrize("target", ["test-torch", "wheels"])
@pytest.mark.parametrize("spec", ["torch>=2.12", "torch", "2.12.0"])
def test_a_version_that_is_not_exact_is_refused(checkout: Path, target: str, spec: str) -> None:
    got, said, calls = run(checkout, target, f"TORCH_SPEC={spec}")
    assert got != 0
    assert f"TORCH_SPEC: got {spec}, want torch==<version>" in said
    assert calls == []


def turn(checkout: Path, number: int, pip: str) -> tuple[str, list[str]]:
    settings = [f"TURN={number}", "OTHER_TORCHES=1.0 2.0 3.0", f"PIP={pip}", "--old-file=build"]
    got, said, calls = run(checkout, "test-other", *settings)
    assert got == 0, said
    return said, calls


@pytest.mark.parametrize(("number", "version"), [(6, "1.0"), (7, "2.0"), (8, "3.0"), (9, "1.0")])
def test_versions_take_turns(checkout: Path, number: int, version: str) -> None:
    said, calls = turn(checkout, number, "true")
    assert f"torch {version} is the other version in turn, of 1.0 2.0 3.0\n" in said
    assert calls == [f"inner test-torch TORCH_SPEC=torch=={version}"]


def test_a_version_that_cannot_be_installed_is_left_out(checkout: Path) -> None:
    said, calls = turn(checkout, 1, "false")
    assert "torch 2.0 cannot be installed here, and is left out\n" in said
    assert calls == []
