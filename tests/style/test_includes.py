"""The directions between the rooms of csrc/, read from the #include lines."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

# Each room with those it may include besides itself.
MAY_INCLUDE = {
    "base": set(),
    "ir": {"base"},
    "ops": {"base", "ir"},
    "convert": {"base", "ir", "ops"},
    "region": {"base", "ir", "ops"},
    "passes": {"base", "ir", "ops", "region"},
    "plan": {"base", "ir", "ops"},
    "cpu": {"base", "ir", "ops", "region"},
    "cuda": {"base", "ir", "ops", "region"},
    "run": {"base", "ir", "ops", "region", "passes", "plan"},
    "optim": {"base", "ir", "ops", "cpu", "cuda", "run"},
    "layers": {"base", "cpu"},
    "capture": {"base", "ir"},
    "python": {
        "base", "ir", "ops", "region", "convert", "passes", "plan", "cpu", "run", "optim",
        "capture", "cuda",
    },
}  # fmt: skip
SEES_TORCH = {"ops", "convert", "cpu", "cuda", "run", "optim", "layers", "capture", "python"}
# Rooms in which some files alone see torch.
TORCH_FILES = {"cuda": {"cuda/index_error.cpp", "cuda/stream.cpp"}}
SEES_PYBIND = {"python"}
SEES_AUTOGRAD_FUNCTIONS = {"run", "layers"}
PROTOBUF_FILES = {"ir/onnx_proto.cpp"}
# Headers that pull in all of torch, or all of its operators: minutes of compile time.
WHOLE_TORCH = {
    "torch/extension.h", "torch/torch.h", "torch/all.h", "ATen/ATen.h", "ATen/Functions.h",
    "ATen/NativeFunctions.h", "ATen/Operators.h",
}  # fmt: skip

TORCH = re.compile(r"(ATen|c10|torch|caffe2)/")
PYBIND = re.compile(r"pybind11/|torch/csrc/utils/pybind\.h|torch/csrc/autograd/python_|Python\.h")
AUTOGRAD_FUNCTIONS = "torch/csrc/autograd/custom_function.h"
PROTOBUF = re.compile(r"google/protobuf/|.*\.pb\.h$")
INCLUDE = re.compile(r"^\s*#\s*include\s+([<\"])([^>\"]+)[>\"]", re.MULTILINE)

FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp"})


def rules_broken(room: str, file: str, text: str) -> list[str]:
    """List what the include lines of one file do that its room may not."""
    broken = []
    for bracket, header in INCLUDE.findall(text):
        first = header.split("/")[0]
        if first in MAY_INCLUDE:
            if bracket == "<":
                broken.append(f"{header}: our headers are included with quotes")
            if first not in MAY_INCLUDE[room] | {room}:
                broken.append(f"{header}: {room}/ may not include {first}/")
        elif (
            bracket == '"'
            and "/" not in header
            and header not in {"build_info.h", "onnx_torch_ort.pb.h"}
        ):
            broken.append(f"{header}: includes are written from csrc/")
        if PYBIND.match(header):
            if room not in SEES_PYBIND:
                broken.append(f"{header}: pybind11 and Python belong to python/")
        elif TORCH.match(header):
            if room not in SEES_TORCH:
                broken.append(f"{header}: {room}/ does not see torch")
            elif file not in TORCH_FILES.get(room, {file}):
                files = " and ".join(sorted(TORCH_FILES[room]))
                broken.append(f"{header}: {files} alone see torch")
        if header == AUTOGRAD_FUNCTIONS and room not in SEES_AUTOGRAD_FUNCTIONS:
            broken.append(f"{header}: nodes of autograd belong to run/")
        if header in WHOLE_TORCH:
            broken.append(f"{header}: include the single headers that are needed")
        if PROTOBUF.match(header) and file not in PROTOBUF_FILES:
            broken.append(f"{header}: protobuf is used by {', '.join(PROTOBUF_FILES)} alone")
    return broken


def test_rooms_are_the_known_ones():
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} <= set(MAY_INCLUDE)
    assert not [path for path in FILES if path.parent == CSRC], "no file lies loose in csrc/"
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CSRC)))
def test_includes_keep_the_directions(path):
    file = path.relative_to(CSRC).as_posix()
    assert rules_broken(file.split("/")[0], file, path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("ir/graph.cpp", '#include "run/step.h"', "ir/ may not include run/"),
        ("plan/arena.cpp", '#include "run/step.h"', "plan/ may not include run/"),
        ("passes/cse.cpp", "#include <ATen/core/Tensor.h>", "passes/ does not see torch"),
        (
            "cuda/build.cpp",
            "#include <ATen/core/Tensor.h>",
            "cuda/index_error.cpp and cuda/stream.cpp alone see torch",
        ),
        ("run/step.cpp", "#include <pybind11/pybind11.h>", "pybind11 and Python belong to python/"),
        (
            "python/bind_step.cpp",
            "#include <torch/csrc/autograd/custom_function.h>",
            "nodes of autograd belong to run/",
        ),
        ("convert/fx.cpp", '#include "onnx_torch_ort.pb.h"', "protobuf is used by"),
        ("run/step.cpp", "#include <ATen/ATen.h>", "include the single headers"),
        ("python/bind_step.cpp", "#include <torch/extension.h>", "include the single headers"),
        ("run/step.cpp", '#include "step.h"', "includes are written from csrc/"),
        ("run/step.cpp", "#include <ir/graph.h>", "with quotes"),
    ],
)
def test_a_wrong_include_is_found(file, line, words):
    (broken,) = rules_broken(file.split("/")[0], file, line + "\n")
    assert words in broken


def test_every_room_is_built():
    cmake = (CSRC.parent / "CMakeLists.txt").read_text()
    rooms = re.findall(r"^torch_ort_room\((\w+)( TORCH)?( PYTHON)?\)", cmake, re.MULTILINE)
    assert {room for room, _, _ in rooms} == set(MAY_INCLUDE)
    assert {room for room, torch, _ in rooms if torch} == SEES_TORCH
    assert {room for room, _, python in rooms if python} == SEES_PYBIND


def test_precompiled_headers_are_those_of_others_that_rooms_include():
    root = CSRC.parent
    lists = re.findall(
        r"^set\((\w+)_headers([^)]*)\)", (root / "cmake/Precompile.cmake").read_text(), re.M
    )
    kinds = {kind: text.replace("${standard_headers}", "").split() for kind, text in lists}
    used = re.findall(
        r"^torch_ort_precompile\((\w+) ([\w ]+)\)", (root / "CMakeLists.txt").read_text(), re.M
    )
    assert {kind for kind, _ in used} == set(kinds)
    for kind, headers in kinds.items():
        rooms = {room for other, names in used if other == kind for room in names.split()}
        included = {
            f"<{header}>"
            for path in FILES
            if path.relative_to(CSRC).parts[0] in rooms
            for _, header in INCLUDE.findall(path.read_text())
        }
        assert [header for header in headers if header not in included] == []
        assert not {header.strip("<>") for header in headers} & WHOLE_TORCH
