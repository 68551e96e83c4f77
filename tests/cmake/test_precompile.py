"""Precompiled headers (cmake/Precompile.cmake), with and without ccache (cmake/Ccache.cmake)."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CMAKE = Path(__file__).parents[2] / "cmake"
PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(tiny LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "{cmake}")
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
add_compile_options(-Werror {options})
include(Ccache)
include(Precompile)
set(tiny_headers <cstddef>)
add_library(torch_ort_a OBJECT csrc/a.cpp)
add_library(torch_ort_b OBJECT csrc/b.cpp csrc/reads.cpp)
target_compile_options(torch_ort_b PRIVATE {options_b})
torch_ort_precompile(tiny a b)
torch_ort_read_headers(reads.cpp)
"""

pytestmark = pytest.mark.skipif(
    not shutil.which("cmake") or not shutil.which("ninja"), reason="needs CMake and ninja"
)


@pytest.fixture
def project(tmp_path):
    """Write a project of two rooms; the names of what it may be built with are the caller's."""

    def write(options="", options_b=""):
        (tmp_path / "csrc").mkdir()
        for name in ("a", "b"):  # they name what the precompiled header alone declares
            (tmp_path / f"csrc/{name}.cpp").write_text(f"std::size_t {name}() {{ return 1; }}\n")
        (tmp_path / "csrc/reads.cpp").write_text("int size_t;\n")
        text = PROJECT.format(cmake=CMAKE, options=options, options_b=options_b)
        (tmp_path / "CMakeLists.txt").write_text(text)
        return tmp_path

    return write


def build(project, folder, launcher="", **environment):
    environment = os.environ | environment
    for command in (
        [
            "cmake",
            "-S",
            ".",
            "-B",
            folder,
            "-G",
            "Ninja",
            f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}",
        ],
        ["ninja", "-C", folder, "-v"],
    ):
        done = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            break
    return done


def test_rooms_of_a_kind_share_one_precompiled_header(project):
    folder = project()
    done = build(folder, "build", CCACHE_DISABLE="1")
    assert done.returncode == 0, done.stdout
    (header,) = (folder / "build").rglob("*.gch")
    assert header.parent.name == "torch_ort_a.dir"
    (reads,) = re.findall(r".*reads\.cpp\.o -c.*", done.stdout)
    assert "-include" not in reads


def test_rooms_of_other_flags_read_the_text_and_say_so(project):
    done = build(project(options_b="-fopenmp"), "build", CCACHE_DISABLE="1")
    assert done.returncode == 0, done.stdout
    (warning,) = re.findall(r"warning: .*cmake_pch\.hxx\.gch.*", done.stdout)
    assert "-Winvalid-pch" in warning


@pytest.mark.skipif(not shutil.which("ccache"), reason="needs ccache")
@pytest.mark.parametrize("launcher", ["", "ccache"])
def test_ccache_keeps_what_is_compiled_with_them(project, launcher):
    folder = project()
    cache = {"CCACHE_DIR": str(folder / "cache")}
    for _ in range(2):
        shutil.rmtree(folder / "build", ignore_errors=True)
        assert build(folder, "build", launcher, **cache).returncode == 0
    counts = subprocess.run(
        ["ccache", "--print-stats"],
        env=os.environ | cache,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = dict(line.split("\t") for line in counts.splitlines())
    # Two files of rooms, one that reads its headers, and the precompiled header.
    assert int(found["cache_miss"]) == 4
    assert int(found["direct_cache_hit"]) + int(found["preprocessed_cache_hit"]) == 4
