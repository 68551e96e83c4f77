"""The built package: what it was built from, what it exports, and whom it lives beside."""

import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from torch_ort import _build_info, _installed

MODEL = '<ir_version: 10, opset_import: ["" : 20]> net (float[2] x) => (float[2] y) { y = Relu(x) }'
# onnx and the `protobuf` package bring protobuf copies of their own, torch a third one.
NEIGHBOURS = {
    "torch": "import torch",
    "ours": "import torch_ort._C",
    "onnx": "import onnx, onnx.checker",
    "protobuf": "from google.protobuf import descriptor_pb2; "
    "descriptor_pb2.FileDescriptorProto(name='x').SerializeToString()",
}
# Each copy parses and writes a message after all of them are loaded.
USE_ALL = f"""
import onnx, torch, torch_ort
from torch_ort import _C
model = onnx.parser.parse_model({MODEL!r})
graph = _C.Graph.from_onnx(model.SerializeToString())
back = onnx.load_from_string(graph.to_onnx())
onnx.checker.check_model(back, full_check=True)
assert back.graph.node[0].op_type == "Relu", back
print("done")
"""


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, so that nothing is imported before it."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def extension_path() -> str:
    from torch_ort import _C

    return _C.__file__


def test_recorded_versions():
    built, here = _build_info.TORCH_VERSION, torch.__version__
    assert built.split(".")[:2] == here.split(".")[:2]
    assert torch.compiled_with_cxx11_abi() is _build_info.CXX11_ABI
    assert importlib.metadata.version(_installed.DISTRIBUTION) == _build_info.VERSION


LAST = ("torch", "onnx", "protobuf", "ours")


# All orders of the three that load a protobuf, with torch at either end of them. Without time, each
# of them comes first once.
@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, id="-".join(order), marks=[pytest.mark.slow] if i % 2 else [])
        for i, order in enumerate([*itertools.permutations(["ours", "onnx", "protobuf"]), LAST])
    ],
)
def test_import_order(order):
    result = run_python("\n".join(NEIGHBOURS[name] for name in order) + USE_ALL)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"


def test_protobuf_symbols_come_from_libprotobuf(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("reads the log of glibc's loader")
    result = run_python(
        USE_ALL, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "log"), LD_BIND_NOW="1"
    )
    assert result.returncode == 0, result.stderr
    binding = re.compile(
        rf"binding file {re.escape(extension_path())} \[\d+\] to (\S+) .*google8protobuf"
    )
    libraries = set()
    for log in tmp_path.iterdir():
        with log.open(errors="replace") as lines:
            libraries |= {os.path.basename(m.group(1)) for m in map(binding.search, lines) if m}
    assert len(libraries) == 1, libraries
    assert libraries.pop().startswith("libprotobuf")


def test_only_the_module_entry_is_exported():
    if not shutil.which("nm"):
        pytest.skip("needs nm of binutils")
    symbols = subprocess.run(
        ["nm", "-D", "-C", "--defined-only", extension_path()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    names = [line.split(" ", 2)[2] for line in symbols]
    assert "PyInit__C" in names
    ours = [
        name for name in names if re.match(r"(torch_ort|torch_ort_onnx|google|pybind11)::", name)
    ]
    assert ours == []


def test_another_torch_is_refused_in_words():
    with pytest.raises(ImportError, match=r"built for torch 2\.12 but torch 2\.13\.0 is install"):
        _installed.check_torch("2.12.0", "2.13.0", True, True)
    with pytest.raises(
        ImportError, match=r"2\.14\.1\+cpu is .*rebuild with .*or install torch 2\.13$"
    ):
        _installed.check_torch("2.13.0+cpu", "2.14.1+cpu", True, True)
    with pytest.raises(ImportError, match=r"built for torch 2\.14\.0a0 but torch 2\.14\.0 is"):
        _installed.check_torch("2.14.0a0+git12", "2.14.0", True, True)
    with pytest.raises(ImportError, match=r"built for torch 2\.14 but torch 2\.14\.0rc1 is"):
        _installed.check_torch("2.14.0", "2.14.0rc1", True, True)
    with pytest.raises(
        ImportError,
        match=r"with the C\+\+11 ABI.*but torch 2\.13\.0\+cpu is one without it; rebuild",
    ):
        _installed.check_torch("2.13.0", "2.13.0+cpu", True, False)


def test_a_build_for_another_processor_is_refused(monkeypatch):
    _installed.check_processor(platform.machine())
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        ImportError,
        match=r"built for x86_64 processors, but this one is riscv64; rebuild with .*"
        r"\(there are kernels for x86_64 and aarch64\)$",
    ):
        _installed.check_processor("x86_64")


FOUND = ["2.13.0", "2.13.0+cpu", "2.13.0+cu126", "2.13.0+cu128", "2.13.0+cu130", "2.13.1+cpu"]


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("built", FOUND)
def test_all_builds_of_a_minor_version_fit(built, found):
    _installed.check_torch(built, found, True, True)


def test_another_torch_is_refused_before_the_extension_is_loaded():
    result = run_python("""
import platform, sys, types
fake = types.ModuleType("torch_ort._build_info")
fake.VERSION, fake.TORCH_VERSION, fake.CXX11_ABI = "0.0.0", "1.0.0", True
fake.PROCESSOR = platform.machine()
sys.modules["torch_ort._build_info"] = fake
try:
    import torch_ort
except ImportError as error:
    print(error)
assert "torch_ort._C" not in sys.modules
""")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("torch_ort was built for torch 1.0 but torch ")


def test_entry_points_name_the_backend():
    found = importlib.metadata.entry_points(group="torch_dynamo_backends")
    ours = {point.name: point.value for point in found if point.value.startswith("torch_ort.")}
    assert ours == {"ort": "torch_ort.backend:ort", "onnxrt": "torch_ort.backend:ort"}


def test_backend_is_found_without_an_import():
    result = run_python(
        """
import sys, torch
layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
assert "torch_ort" not in sys.modules
for name in ("ort", "onnxrt"):
    torch.compiler.reset()
    compiled = torch.compile(layer, backend=name)
    torch.testing.assert_close(compiled(x), layer(x))
    print(name, sys.modules["torch_ort"].counters()["graphs_captured"])
""",
        TORCH_ORT_STRICT="1",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["ort 1", "onnxrt 2"]


def install_namesake(site: Path, entry_points: str = "") -> None:
    """Leave in `site` what pip leaves of a distribution torch-ort."""
    info = site / "torch_ort-1.19.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-ort\nVersion: 1.19.2\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_another_distribution_with_our_package_is_named(tmp_path):
    install_namesake(tmp_path)
    code = "import torch_ort; torch_ort.optim.SGD"
    result = run_python(code, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert (
        f"torch-ort 1.19.2 is installed beside torch-ort-engine {_build_info.VERSION}, and both "
        "contain the package torch_ort"
    ) in result.stderr
    assert "run `pip uninstall torch-ort`, then install torch-ort-engine again" in result.stderr
    # The warning is that of the user's import.
    assert result.stderr.startswith("<string>:1: UserWarning: torch_ort: ")


def test_an_install_from_before_the_distribution_had_its_name_is_let_be(tmp_path, monkeypatch):
    install_namesake(tmp_path, "[torch_dynamo_backends]\nort = torch_ort.backend:ort\n")
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _installed.warn_of_namesakes("0.1.0")


def test_extras_name_the_distribution():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'\nname = "{_installed.DISTRIBUTION}"\n' in project
    assert "torch_ort[" not in project
