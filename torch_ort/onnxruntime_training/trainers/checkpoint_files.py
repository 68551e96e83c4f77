"""Checkpoint files: written atomically, and read as plain data, never as code."""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_ort.core.user_code import calling_line, warn_at

PathLike = str | os.PathLike[str]

EXTENSION = ".ort.pt"
_HDF5 = b"\x89HDF\r\n\x1a\n"


def file_name(prefix: str, rank: int | None, world_size: int) -> str:
    """Name the file of a job, or that of a rank whose optimizer state is sharded."""
    part = "" if rank is None else f".ZeRO.{rank}.{world_size - 1}"
    return f"{prefix}{part}{EXTENSION}"


def find(folder: PathLike, prefix: str, rank: int | None, world_size: int) -> list[Path]:
    """List the files of a checkpoint that a job has to read, or a rank of it.

    That is the one that it would write itself; else one without parts; else all parts, of
    whatever number of ranks. A UserWarning tells where there are more than are read, or several.

    Raises AssertionError where there is none, or a part is missing.
    """
    own = Path(folder) / file_name(prefix, rank, world_size)
    whole = Path(folder) / file_name(prefix, None, 1)
    parts = _parts(folder, prefix)
    for path in (own, whole):
        if path.is_file():
            if parts and rank is None:
                warn_at(calling_line(), f"{path}: read alone, with parts beside it", UserWarning)
            return [path]
    if not parts:
        of_rank = "" if rank is None else f" of rank {rank}"
        raise AssertionError(f"checkpoint: got no file{of_rank} at {own}")
    last = max(parts)
    wanted = [Path(folder) / file_name(prefix, it, last + 1) for it in range(last + 1)]
    missing = [str(path) for path in wanted if path not in parts[last]]
    if missing:
        raise AssertionError(f"checkpoint: got no file at {', '.join(missing)}")
    names = f"{prefix}.ZeRO.*.{last}{EXTENSION}"
    warn_at(calling_line(), f"{folder}: {last + 1} files {names} are put together", UserWarning)
    return wanted


def _parts(folder: PathLike, prefix: str) -> dict[int, list[Path]]:
    """Give the files of ranks, by the number of the last rank."""
    pattern = re.compile(rf"{re.escape(prefix)}\.ZeRO\.\d+\.(\d+){re.escape(EXTENSION)}")
    found: dict[int, list[Path]] = {}
    for path in Path(folder).glob("*"):
        if match := pattern.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return found


def in_folder(folder: PathLike, name: str) -> Path:
    """Give the path of a file in a folder."""
    return Path(folder) / name


def write(path: PathLike, data: Mapping[str, Any]) -> None:
    """Write data that `torch.load(weights_only=True)` reads; an existing file is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    torch.save(dict(data), part)
    part.replace(path)


def check_plain(what: str, data: Any) -> None:
    """Raise ValueError for data of a caller that could be written and not be read again."""
    file = io.BytesIO()
    try:
        torch.save(data, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{what}: got what cannot be read back as plain data ({_first_line(error)}), want "
            "numbers, strings, tensors, and lists and dicts of them"
        ) from error


def read(path: PathLike) -> dict[str, Any]:
    """Read a checkpoint, its tensors onto the CPU.

    Raises FileNotFoundError, and ValueError for files of another kind: HDF5 by name.
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(len(_HDF5))
    if start == _HDF5:
        raise ValueError(
            f"{path}: got an HDF5 file of ONNX Runtime Training, want one written by torch_ort; "
            "load it there, `torch.save(trainer.state_dict(pytorch_format=True), path)`, and give "
            "that to the model's load_state_dict here"
        )
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: got no file of torch.save, want one written by torch_ort")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{path}: got no checkpoint of plain data ({_first_line(error)}), want one written by "
            "torch_ort"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got a {type(found).__name__}, want a checkpoint, a dict")
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
