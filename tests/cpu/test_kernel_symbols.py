"""Kernels are built once per instruction set with internal linkage: a function that their objects
shared with the rest could be taken from the one that the processor does not run.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

BUILD = pathlib.Path(__file__).parents[2] / "build"
NAMESPACES = {"portable": "7DEFAULT", "avx2": "4AVX2", "avx512": "6AVX512", "neon": "4NEON"}


@pytest.mark.parametrize("isa", NAMESPACES)
def test_objects_of_kernels_give_their_two_tables_alone(isa: str) -> None:
    folder = "arm64/build" if isa == "neon" else "cpython-*"
    objects = list(BUILD.glob(f"{folder}/**/kernels_{isa}.cpp.o"))
    if not objects or not shutil.which("nm"):
        pytest.skip("needs a build folder and nm")
    newest = max(objects, key=lambda path: path.stat().st_mtime)
    command = ["nm", "--defined-only", "--extern-only", str(newest)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    # Weak symbols are merged over all objects, whoever runs them. ATen's vectors are told apart by
    # the namespace of their instruction set.
    names = {line.split()[-1] for line in lines}
    of_vectors = tuple(f"{prefix}2at3vec{NAMESPACES[isa]}" for prefix in ("_ZN", "_ZZN"))
    others = {name for name in names if not name.startswith(of_vectors)}
    tables = [f"{dtype}_kernels_{isa}" for dtype in ("double", "float")]
    assert others == {f"_ZN9torch_ort3cpu{len(name)}{name}Ev" for name in tables}
