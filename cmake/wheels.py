"""Build a wheel for each Python of this machine, beside one version of torch.

    wheels.py --torch VERSION [--make COMMAND] [PYTHON...]

Each is built in a copy of the checkout, build/wheels-torch-VERSION/<Python>, with an environment of
its own, and comes into dist/torch-<minor version>. A Python for which pip finds no such torch is
left out in words. The exit status is 1 if a build fails, or if there is no wheel at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from checkout import copy

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = 10, 15  # minor versions of Python 3 that are looked for
TAG = "import sys; print(sys.implementation.cache_tag)"


def find_pythons() -> dict[str, str]:
    """Give the Pythons in PATH and those of pyenv, one for each minor version, by cache tag."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [f"python3.{minor}" for minor in range(OLDEST, NEWEST + 1)]
    in_path = [path for path in map(shutil.which, names) if path]
    return _by_tag([*in_path, *(str(p) for n in names for p in pyenv.glob(f"versions/*/bin/{n}"))])


def _by_tag(pythons: list[str]) -> dict[str, str]:
    tags = {python: tag_of(python) for python in pythons}
    return {tag: python for python, tag in reversed(tags.items()) if tag}


def tag_of(python: str) -> str:
    """Give the cache tag of a Python that can make environments and be built against, else ""."""
    needs = "import sysconfig, os, venv, ensurepip; os.stat(sysconfig.get_path('include'))"
    done = subprocess.run(
        [python, "-c", f"{needs}; {TAG}"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


class BuildError(Exception):
    """A wheel could not be built; the message names the log."""


class NoTorch(Exception):
    """pip finds no such torch for a Python; the message names the log."""


def build(python: str, tag: str, torch: str, make: str) -> Path:
    """Build a wheel, and give its path.

    Raises NoTorch or BuildError.
    """
    folder = ROOT / "build" / f"wheels-torch-{torch}" / tag
    copy(ROOT, folder)
    log = folder / "build" / "wheel.txt"
    log.parent.mkdir(exist_ok=True)
    # An active environment is not used, nor is a torch of that Python.
    settings = (
        "VIRTUAL_ENV=",
        "TORCH_OLDEST=999",
        f"BASE_PYTHON={python}",
        f"TORCH_SPEC=torch=={torch}",
    )
    with log.open("w") as file:

        def can_make(target: str) -> bool:
            command = [*make.split(), "-C", str(folder), *settings, target]
            return subprocess.run(command, stdout=file, stderr=file, check=False).returncode == 0

        if not can_make(str(folder / ".venv" / "torch_ort-constraint.txt")):
            raise NoTorch(f"left out, since torch {torch} cannot be installed: {log}")
        if not can_make("wheel"):
            raise BuildError(f"failed: {log}")
    return _collect(folder)


def _collect(folder: Path) -> Path:
    (wheel,) = folder.glob("dist/*/*.whl")
    target = ROOT / wheel.relative_to(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, target))


def main() -> int:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", required=True)
    parser.add_argument("--make", default="make")
    parser.add_argument("pythons", nargs="*")
    options = parser.parse_args()
    made, failed = [], []
    for tag, python in (_by_tag(options.pythons) or find_pythons()).items():
        said = ""
        try:
            made.append(build(python, tag, options.torch, options.make))
            said = str(made[-1].relative_to(ROOT))
        except NoTorch as none:
            said = str(none)
        except BuildError as error:
            failed.append(tag)
            said = str(error)
        print(f"{tag} ({python}): {said}", flush=True)
    return 0 if made and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
