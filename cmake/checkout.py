"""Copies this checkout into a folder, where it is built and tested beside another torch.

    python3 cmake/checkout.py FOLDER

The copy has the files that git knows or would take, as they are now, and all of them where there is
no git. Files that are as they were keep their times, so that a second build compiles what has
changed; what the checkout has lost since the last copy goes; what was made in the copy stays.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of a folder without git: what was built, installed or fetched there.
LEFT_OUT = {".git", ".venv", ".gpu", "build", "dist", "__pycache__"}
LIST = ".copied"
MADE = ("torch_ort/_C.*", "torch_ort/_build_info.py", LIST)


def files_of(root: Path) -> list[str]:
    """List the files of a checkout by their paths in it."""
    found = _files_of_git(root) if (root / ".git").exists() else _files_below(root)
    return sorted(name for name in found if (root / name).is_file())


def _files_of_git(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def _files_below(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for path in (Path(folder, name).relative_to(root) for name in files):
            if not any(path.match(pattern) for pattern in MADE):
                yield str(path)


def copy(root: Path, folder: Path) -> list[str]:
    """Bring a folder to what the checkout is, and give the files that were written."""
    files = files_of(root)
    folder.mkdir(parents=True, exist_ok=True)
    written = [name for name in files if _copy_if_changed(root / name, folder / name)]
    kept = folder / LIST
    before = kept.read_text().splitlines() if kept.exists() else []
    for name in set(before) - set(files):
        (folder / name).unlink(missing_ok=True)
    kept.write_text("\n".join(files))
    return written


def _copy_if_changed(source: Path, target: Path) -> bool:
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    # Its time is that of the copy: what was built since the file was edited is older than it.
    shutil.copyfile(source, target)
    shutil.copymode(source, target)
    return True


if __name__ == "__main__":
    print(f"{len(copy(ROOT, Path(sys.argv[1])))} files copied into {sys.argv[1]}")
