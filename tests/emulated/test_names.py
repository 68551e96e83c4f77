"""Where `cuda` can be the test device, and what stands for CUDA's libraries beside a torch that is
built with CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from emulated import build, cuda_device, cuda_driver, cuda_names

SYMBOLS = {
    "_Z1fi": ("T", 20), "_Z4inlv": ("W", 4), "_ZTIN3c101AE": ("V", 24), "_ZN3c104dataE": ("B", 40),
    "_Z7unaskedv": ("T", 8), "_ZN4c10d15get_gil_checkerEv": ("T", 8),
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Path:
    wanted = {*SYMBOLS, "_ZSt9terminatev"} - {"_Z7unaskedv"}
    return build.library_of_text("libnames.so", cuda_names.source(wanted, SYMBOLS), (), ())


def symbols_of(path: Path) -> list[str]:
    return [name for name in cuda_names._symbols(path, "--defined-only") if name in SYMBOLS]


def test_the_library_has_the_names_that_are_asked_for(library: Path) -> None:
    assert set(symbols_of(library)) == SYMBOLS.keys() - {"_Z7unaskedv"}


def run(code: str, library: Path) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes; library = ctypes.CDLL({str(library)!r}); {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["_Z1fi", "_Z4inlv"])
def test_a_function_refuses_by_its_name(name: str, library: Path) -> None:
    done = run(f"getattr(library, {name!r})()", library)
    assert done.returncode != 0
    assert f"the test device has nothing of CUDA's {name}" in done.stderr


def test_what_the_bindings_write_into_is_there(library: Path) -> None:
    code = """
place = library._ZN4c10d15get_gil_checkerEv
place.restype = ctypes.c_void_p
assert place() == place() != None
ctypes.memset(place(), 1, 64)
assert bytes((ctypes.c_char * 40).in_dll(library, "_ZN3c104dataE")) == bytes(40)
kind, name, _ = (ctypes.c_void_p * 3).in_dll(library, "_ZTIN3c101AE")
assert kind and ctypes.string_at(name) == b"N3c101AE"
"""
    done = run(f"exec({code!r})", library)
    assert done.returncode == 0, done.stderr


def test_options_are_those_of_all_backends() -> None:
    name = "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb"
    text = cuda_names.source({name}, {name: ("T", 8)})
    assert 'new (self) c10d::Backend::Options("nccl")' in text
    assert text.startswith("#include <torch/csrc/distributed/c10d/Backend.hpp>")


def test_nothing_is_made_for_a_torch_without_cuda(tmp_path, monkeypatch) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(build, "torch_folder", lambda: tmp_path)
    assert cuda_names.libraries() == []


@pytest.mark.parametrize(
    ("version", "has_gpu", "want"),
    [
        ({"cuda": None}, True, True),  # which this torch cannot use
        ({"cuda": "13.0"}, True, False),
        ({"cuda": "13.0"}, False, True),
        ({"cuda": None, "hip": "6.4"}, False, False),
        ({"cuda": None, "xpu": "2025"}, False, False),
    ],
)
def test_where_the_device_is_possible(version, has_gpu, want, monkeypatch) -> None:
    monkeypatch.setattr(build, "torch_version", lambda: version)
    monkeypatch.setattr(cuda_device, "has_gpu", lambda: has_gpu)
    assert cuda_device.is_possible() is want


@pytest.mark.parametrize("library", ["the fake driver", "not a library", None])
def test_a_gpu_is_what_the_driver_counts(library, tmp_path, monkeypatch) -> None:
    path = tmp_path / "libcuda.so.1"
    if library == "the fake driver":
        path.symlink_to(cuda_driver.library())
    elif library:
        path.write_text(library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    count = cuda_device.COUNT_GPUS if library else cuda_device.COUNT_GPUS.replace("cuda", "none")
    monkeypatch.setattr(cuda_device, "COUNT_GPUS", count)
    assert cuda_device.has_gpu() is (library == "the fake driver")
