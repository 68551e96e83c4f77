"""Writes the sub-package `training` into an installed onnxruntime, and removes it again.

Outside that folder only `BESIDE` is written. A marker inside lists the files with their hashes, so
that what others put there or changed is never removed or written over.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import re
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from torch_ort import _build_info
from torch_ort._C import UserError
from torch_ort.onnxruntime_training.compat.old_names import BESIDE, MODULES, is_package

FOLDER = "training"
MARKER = "torch_ort_compat.json"

_HEAD = """\
# Placed by `python -m torch_ort.compat install`; `uninstall` removes it.
# What stands here is the table torch_ort/onnxruntime_training/compat/old_names.py.
"""
# While ONNX Runtime up to 1.21 is imported, it asks for ORTModule to find out whether it is a
# training build. The answer is no, so that programs for inference need not import torch.
_GUARD = """\
import onnxruntime

if getattr(onnxruntime.__spec__, "_initializing", False):
    raise ImportError("onnxruntime.training: not while onnxruntime itself is imported")

"""
_BODY = """\
from torch_ort.compat.old_names import open_module

open_module(globals())
"""
_BODY_BESIDE = """\
from torch_ort.compat.old_names import open_module

open_module(globals(), {path!r})
"""
# The paths as the marker and the folder have them.
_OUTSIDE = {f"../{name}": path for name, path in BESIDE.items()}

Hashes = dict[str, str]


def files() -> dict[str, str]:
    """Give the text of each file to place, by its path in the folder."""
    texts = {}
    for module in MODULES:
        parts = module.split(".") if module else []
        path = [*parts, "__init__"] if is_package(module) else parts
        texts["/".join(path) + ".py"] = _HEAD + (_BODY if module else _GUARD + _BODY)
    for name, path in _OUTSIDE.items():
        texts[name] = _HEAD + _BODY_BESIDE.format(path=path)
    return texts


def install() -> str:
    """Place the files; gives what to tell the user.

    Raises UserError where there is no onnxruntime, or a training build, or changed files.
    """
    package = _find_onnxruntime()
    if package is None or not _is_whole(package):
        raise UserError(
            "no onnxruntime is installed here, want one for inference; "
            "run `pip install onnxruntime` first"
        )
    training_build = _find_training_build()
    if training_build:
        raise UserError(
            f"the distribution {training_build} is installed, want onnxruntime for inference; "
            f"run `pip uninstall {training_build}` first"
        )
    folder = package / FOLDER
    placed = _read_marker(folder)
    changed = _changed(folder, placed)
    if changed:
        raise UserError(
            f"{folder}: changed since they were placed: {', '.join(changed)}; "
            "run `python -m torch_ort.compat uninstall`, which leaves them, and move them away"
        )
    foreign = [name for name in _OUTSIDE if name not in placed and _is_foreign(package, name)]
    if foreign:
        raise UserError(f"{_shown(package, foreign)}: not placed by torch_ort, left alone")
    wanted = _hashes(files())
    if placed == wanted and not _absent(folder, placed):
        return f"{folder}: in place already"
    _remove(folder, placed)
    _place(folder, wanted)
    verb = "placed anew" if placed else "placed"
    return (
        f"{folder}: {verb} {len(wanted)} modules for the old import paths, "
        f"{_shown(package, _OUTSIDE)} among them"
    )


def uninstall() -> str:
    """Remove the files of `install` that are unchanged; returns a message for the user.

    Raises UserError if the folder is not ours.
    """
    package = _find_onnxruntime()
    if package is None:
        return "no onnxruntime is installed here, nothing to remove"
    folder = package / FOLDER
    placed = _read_marker(folder)
    if not placed:
        return f"{folder}: not there, nothing to remove"
    left = [name for name in _changed(folder, placed) if name in _OUTSIDE]
    _remove(folder, placed)
    left += sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if left:
        return f"{folder}: removed what was placed; left what is not ours: {', '.join(left)}"
    return f"{folder}: removed"


def status() -> str:
    """Describe what is installed."""
    package = _find_onnxruntime()
    if package is None:
        return "onnxruntime: not installed"
    folder = package / FOLDER
    training_build = _find_training_build()
    lines = [
        f"onnxruntime: {package}" if _is_whole(package) else f"onnxruntime: gone from {package}"
    ]
    if training_build:
        lines.append(f"training build: the distribution {training_build}")
    try:
        lines.append(f"onnxruntime.training: {_state(folder)}")
    except UserError as error:
        lines.append(f"onnxruntime.training: {error}")
    return "\n".join(lines)


def _state(folder: Path) -> str:
    placed = _read_marker(folder)
    if not placed:
        return "not there; `python -m torch_ort.compat install` places it"
    text = f"placed by torch_ort, {len(placed)} modules"
    for words, names in (("changed", _changed(folder, placed)), ("gone", _absent(folder, placed))):
        if names:
            text += f"; {words}: {', '.join(names)}"
    if placed != _hashes(files()):
        text += f"; not those of torch_ort {_build_info.VERSION}, run install again"
    return text


def _find_onnxruntime() -> Path | None:
    """Give the folder that `import onnxruntime` would use, without importing it."""
    importlib.invalidate_caches()
    # importlib.util.find_spec would prefer an imported module to what is on sys.path.
    spec = PathFinder.find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(location) for location in spec.submodule_search_locations]
    # If pip has removed onnxruntime, the placed files are left, perhaps in one of several folders.
    return next((it for it in folders if (it / FOLDER / MARKER).is_file()), folders[0])


def _is_whole(package: Path) -> bool:
    # A checkout of the sources has no capi/. What pip leaves behind has no __init__.py.
    return (package / "__init__.py").is_file() and (package / "capi").is_dir()


def _find_training_build() -> str:
    """Give the name of the distribution of a training build; empty if there is none."""
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", (distribution.metadata or {}).get("Name", "")).lower()
        if re.match(r"(onnxruntime|ort)-(.*-)?training", name):
            return name
    return ""


def _read_marker(folder: Path) -> Hashes:
    """Give the hashes of what we placed; empty if there is no folder.

    Raises UserError if the folder is not ours.
    """
    if not folder.exists() and not folder.is_symlink():
        return {}
    marker = folder / MARKER
    if folder.is_symlink() or not marker.is_file():
        raise UserError(f"{folder}: not placed by torch_ort, left alone")
    try:
        placed = json.loads(marker.read_text(encoding="utf-8"))["files"]
        if all(_is_inside(folder, name) for name in placed):
            return dict(placed)
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{marker}: cannot be read; remove {folder} by hand")


def _is_foreign(package: Path, name: str) -> bool:
    """Tell whether a file beside the folder exists with another content than ours."""
    path = package / name.removeprefix("../")
    return path.exists() and path.read_bytes() != files()[name].encode()


def _shown(package: Path, names: Iterable[str]) -> str:
    """Name files outside of the folder by where they lie in onnxruntime."""
    return ", ".join(f"{package.name}/{name.removeprefix('../')}" for name in names)


def _is_inside(folder: Path, name: str) -> bool:
    return name in _OUTSIDE or (folder / name).resolve().is_relative_to(folder.resolve())


def _place(folder: Path, hashes: Hashes) -> None:
    folder.mkdir(exist_ok=True)
    # The marker is written first, so that files of an interrupted install are recognized.
    marker = {"placed_by": f"torch_ort {_build_info.VERSION}", "files": hashes}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _remove(folder: Path, placed: Hashes) -> None:
    """Remove files that are as we placed them, their bytecode, the marker, and empty folders."""
    if not placed:
        return
    kept = _changed(folder, placed)
    for name in placed.keys() - set(kept):
        path = folder / name
        path.unlink(missing_ok=True)
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            bytecode.unlink()
    for name in placed.keys() & _OUTSIDE.keys():
        _remove_if_empty((folder / name).parent / "__pycache__")
    # The marker is removed last, so that an interrupted removal can be continued.
    (folder / MARKER).unlink()
    inside = placed.keys() - _OUTSIDE.keys()
    parents = {parent for name in inside for parent in (folder / name).parents}
    ours = {it for it in parents if it == folder or folder in it.parents}
    for parent in sorted(ours, key=lambda it: len(it.parts), reverse=True):
        for directory in (parent / "__pycache__", parent):
            _remove_if_empty(directory)


def _remove_if_empty(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def _changed(folder: Path, placed: Hashes) -> list[str]:
    return [
        name
        for name, known in placed.items()
        if (folder / name).is_file() and _hash((folder / name).read_bytes()) != known
    ]


def _absent(folder: Path, placed: Hashes) -> list[str]:
    return [name for name in placed if not (folder / name).is_file()]


def _hashes(texts: dict[str, str]) -> Hashes:
    return {name: _hash(text.encode()) for name, text in texts.items()}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
