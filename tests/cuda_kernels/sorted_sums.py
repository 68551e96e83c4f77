"""Runs of cases on the kernels that add rows by their ids, with their texts and launches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import embedding_cases
import pytest
import regions
import take_cases
import torch

from torch_ort import _C

Case = embedding_cases.Case | take_cases.Case


def run(case: Case) -> torch.Tensor:
    """Run a case and compare. A bad id has to raise an error at the next call."""
    compiled = regions.Compiled(case.graph(), regions.CUDA)
    got = compiled.run(case.given())
    case.compare(got, case.wanted())
    if case.tells_fault:
        with pytest.raises(IndexError, match=case.words):
            compiled.run(case.given())
    return got["y"]


def texts_of(case: Case, folder: Path) -> dict[str, str]:
    """Give the texts that a case runs, by name, and leave them in a folder."""
    compiled = regions.Compiled(case.graph(), regions.CUDA, kernel_dump_dir=str(folder))
    compiled.run(case.given())
    return {path.stem: path.read_text() for path in folder.glob("*.cu")}


def launches_of(
    cases: dict[str, Case], names: Iterable[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """List the launches of some cases."""
    lines = []
    for name in names:
        log = folder / name
        monkeypatch.setenv("EMULATED_CUDA_LOG", str(log))
        run(cases[name])
        lines += [f"-- {name}", *log.read_text().splitlines()]
    return "\n".join(lines) + "\n"


def run_with_wide_columns(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a case with the texts for more columns than 32 bits count, which no test could have."""
    texts_of(case, folder)
    (path,) = (each for each in folder.glob("*.cu") if "_sort_" not in each.stem)
    text = path.read_text()
    assert text.count("typedef int index_t;") == 1
    path.write_text(text.replace("typedef int index_t;", "typedef long long index_t;"))
    monkeypatch.setenv("EMULATED_CUDA_TEXTS", str(folder))
    _C.cuda.forget_builds()
    run(case)
    monkeypatch.delenv("EMULATED_CUDA_TEXTS")
    _C.cuda.forget_builds()
