"""cmake/checkout.py: what is copied, and what stays as it was."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

# By its path, since a folder cmake among the modules would hide the package of that name.
_spec = importlib.util.spec_from_file_location(
    "checkout", Path(__file__).parents[2] / "cmake" / "checkout.py"
)
checkout = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checkout)


@pytest.fixture(params=["with git", "without git"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Make a checkout in which something was built."""
    root = tmp_path / "root"
    for name in ("Makefile", "torch_ort/a.py", "build/x.o", "torch_ort/_C.cpython-311.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("/build/\n/torch_ort/_C.*\n")
    if request.param == "with git":
        subprocess.run(["git", "init", "-q", root], check=True)
    return root


OF_THE_CHECKOUT = [".gitignore", "Makefile", "torch_ort/a.py"]


def test_what_was_built_is_not_copied(root: Path, tmp_path: Path) -> None:
    assert checkout.copy(root, tmp_path / "copy") == OF_THE_CHECKOUT
    assert not (tmp_path / "copy" / "build").exists()


def test_what_is_as_it_was_keeps_its_time(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    checkout.copy(root, copy)
    os.utime(copy / "Makefile", (10, 10))
    os.utime(root / "Makefile", (20, 20))
    assert checkout.copy(root, copy) == []
    assert (copy / "Makefile").stat().st_mtime == 10


def test_what_has_changed_is_newer_than_what_was_built(root: Path, tmp_path: Path) -> None:
    """An edit may be older than what was built of the file before it."""
    copy = tmp_path / "copy"
    checkout.copy(root, copy)
    built = copy / "build" / "a.o"
    built.parent.mkdir()
    built.write_text("")
    (root / "torch_ort" / "a.py").write_text("changed")
    os.utime(root / "torch_ort" / "a.py", (10, 10))
    assert checkout.copy(root, copy) == ["torch_ort/a.py"]
    changed = copy / "torch_ort" / "a.py"
    assert changed.read_text() == "changed"
    assert changed.stat().st_mtime_ns >= built.stat().st_mtime_ns


def test_what_is_lost_goes_and_what_was_made_stays(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    checkout.copy(root, copy)
    (copy / "build").mkdir()
    (copy / "build" / "made").write_text("")
    (root / "Makefile").unlink()
    assert checkout.copy(root, copy) == []
    assert not (copy / "Makefile").exists()
    assert (copy / "build" / "made").exists()


def test_a_copy_of_a_copy_is_whole(root: Path) -> None:
    """It has no git of its own, and the one around it ignores it."""
    copy = root / "build" / "torch-1.0" / "checkout"
    checkout.copy(root, copy)
    assert checkout.copy(copy, copy / "build" / "again") == OF_THE_CHECKOUT


def test_a_checkout_with_a_copy_in_it_is_not_copied_twice(root: Path) -> None:
    copy = root / "build" / "torch-1.0" / "checkout"
    checkout.copy(root, copy)
    assert checkout.copy(root, copy) == []
    assert not (copy / "build").exists()
