"""cmake/wheels.py: which Pythons it takes, and what it says of each, with a make that answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "cmake" / "wheels.py"
TAG = sys.implementation.cache_tag
# Called as: make -C FOLDER SETTINGS... TARGET
MAKE = r"""#!/bin/sh
folder=$2
for target; do :; done
echo "$@" >> "$CALLS"
case "$target" in
  wheel) [ -z "$NO_WHEEL" ] || exit 2
    mkdir -p "$folder/dist/torch-9.1"; echo wheel > "$folder/dist/torch-9.1/engine-cp3.whl";;
  *) [ -z "$NO_TORCH" ] || exit 2;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout of the two scripts alone, a make, and a python3.10 that cannot be used."""
    for name in ("cmake/wheels.py", "cmake/checkout.py"):
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((PROGRAM.parents[1] / name).read_text())
    commands = {"make": MAKE, "python3.10": "#!/bin/sh\nexit 127\n"}
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path / "checkout"


def run(checkout: Path, *arguments: str, **variables: str) -> tuple[int, list[str], list[str]]:
    """Give the exit status, what is said, and the calls of make."""
    calls = checkout.parent / "calls"
    calls.write_text("")
    done = subprocess.run(
        [sys.executable, checkout / "cmake" / "wheels.py", "--torch", "9.1.2", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": f"{checkout.parent / 'bin'}:/usr/bin:/bin",
            "PYENV_ROOT": str(checkout.parent / "pyenv"),
            "CALLS": str(calls),
            **variables,
        },
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines(), calls.read_text().splitlines()


def test_a_wheel_comes_into_the_folder_of_its_torch(checkout: Path) -> None:
    status, said, calls = run(checkout, sys.executable)
    assert status == 0
    assert said == [f"{TAG} ({sys.executable}): dist/torch-9.1/engine-cp3.whl"]
    assert (checkout / "dist" / "torch-9.1" / "engine-cp3.whl").read_text() == "wheel\n"
    copy = checkout / "build" / "wheels-torch-9.1.2" / TAG
    assert (copy / "cmake" / "wheels.py").exists()
    settings = f"VIRTUAL_ENV= TORCH_OLDEST=999 BASE_PYTHON={sys.executable} TORCH_SPEC=torch==9.1.2"
    assert calls == [
        f"-C {copy} {settings} {copy}/.venv/torch_ort-constraint.txt",
        f"-C {copy} {settings} wheel",
    ]


def test_a_python_without_such_a_torch_is_left_out(checkout: Path) -> None:
    status, said, calls = run(checkout, sys.executable, NO_TORCH="1")
    assert status == 1  # there is no wheel at all
    assert said[0].startswith(
        f"{TAG} ({sys.executable}): left out, since torch 9.1.2 cannot be installed: "
    )
    assert said[0].endswith(f"{TAG}/build/wheel.txt")
    assert len(calls) == 1


def test_a_build_that_fails_names_its_log(checkout: Path) -> None:
    status, said, _ = run(checkout, sys.executable, NO_WHEEL="1")
    assert status == 1
    assert said[0].startswith(f"{TAG} ({sys.executable}): failed: ")


def test_pythons_are_those_in_path_and_of_pyenv(checkout: Path) -> None:
    minor = f"python3.{sys.version_info.minor}"
    for version in ("a", "b"):  # the same minor version twice
        folder = checkout.parent / "pyenv" / "versions" / version / "bin"
        folder.mkdir(parents=True)
        (folder / minor).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / minor).chmod(0o755)
    status, said, _ = run(checkout)
    assert status == 0
    ours = [line for line in said if line.startswith(f"{TAG} (")]
    assert len(ours) == 1
    assert not [line for line in said if "bin/python3.10" in line and str(checkout.parent) in line]
