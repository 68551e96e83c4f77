"""What the wheel that `make wheel-arm64` leaves in dist carries."""

from __future__ import annotations

import re
import struct
import zipfile
from pathlib import Path

import pytest

WHEELS = sorted((Path(__file__).parents[2] / "dist").glob("torch-*/*_aarch64.whl"))
EM_AARCH64 = 183  # of the field e_machine of ELF files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="no such wheel in dist/: run `make wheel-arm64`"),
]


@pytest.fixture
def wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(WHEELS[-1])


def test_the_module_is_for_the_processor_and_so_are_its_libraries(wheel):
    names = [name for name in wheel.namelist() if ".so" in name]
    (module,) = [name for name in names if name.startswith("torch_ort/_C.")]
    assert re.fullmatch(r"torch_ort/_C\.cpython-\d+-aarch64-linux-gnu\.so", module)
    assert [name for name in names if name.startswith("torch_ort_engine.libs/libprotobuf")]
    for name in names:
        head = wheel.read(name)[:20]
        assert head[:4] == b"\x7fELF", name
        assert struct.unpack("<H", head[18:20]) == (EM_AARCH64,), name


def test_libraries_of_torch_and_sources_are_left_out(wheel):
    names = wheel.namelist()
    assert not [name for name in names if re.search(r"libtorch|libc10|gomp|nvidia", name)]
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


def test_what_it_was_built_for(wheel):
    assert 'PROCESSOR = "aarch64"' in wheel.read("torch_ort/_build_info.py").decode()


def test_the_module_has_the_kernels(wheel):
    (module,) = [name for name in wheel.namelist() if name.startswith("torch_ort/_C.")]
    words = wheel.read(module)
    assert b"neon" in words
    assert b"avx512" not in words
