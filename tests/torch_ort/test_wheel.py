"""The wheel that `make wheel` leaves in dist, in an environment with nothing else in it."""

import os
import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}-*_{platform.machine()}"
WHEELS = sorted((ROOT / "dist" / f"torch-{MINOR}").glob(f"torch_ort_engine-*-{TAG}.whl"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="no such wheel in dist/: run `make wheel`"),
]

TRAIN = """
import sys, torch
assert "torch_ort" not in sys.modules
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
x, y = torch.randn(16, 4), torch.randn(16, 1)
compiled = torch.compile(model, backend="ort")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(5):
    loss = torch.nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True), losses
import torch_ort
counters = torch_ort.counters()
assert counters["forward_runs"] == counters["backward_runs"] == 5, counters
assert counters["fallbacks"] == 0, counters
maps = open("/proc/self/maps").read()
print(torch_ort._C.__file__)
print(*sorted({line.split()[-1] for line in maps.splitlines() if "libprotobuf" in line}))
"""


# Another build of the same version of torch that the wheel is tried beside: torch===2.13.0 is that
# of the package index, where pip would take 2.13.0+cpu for torch==2.13.0.
OTHER = os.environ.get("WHEEL_TORCH")


@pytest.fixture(scope="module", params=[f"torch=={torch.__version__}", *([OTHER] if OTHER else [])])
def python(request, tmp_path_factory):
    """Install the wheel and torch, and nothing else, in a new environment; give its Python."""
    env = tmp_path_factory.mktemp("wheel") / "env"
    venv.create(env, with_pip=True)
    python = env / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", request.param, WHEELS[-1]], check=True)
    return python


def test_wheel_carries_libprotobuf_and_leaves_torch_out():
    names = zipfile.ZipFile(WHEELS[-1]).namelist()
    libraries = [name for name in names if name.startswith("torch_ort_engine.libs/")]
    assert [name for name in libraries if "libprotobuf" in name]
    assert not [name for name in names if "libtorch" in name or "libc10" in name or "gomp" in name]
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


def test_wheel_trains_in_an_empty_environment(python, tmp_path):
    result = subprocess.run(
        [python, "-c", TRAIN],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TORCH_ORT_STRICT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    module, libraries = result.stdout.splitlines()
    prefix = str(python.parents[1])
    assert module.startswith(prefix)
    assert libraries.startswith(prefix), "libprotobuf is the wheel's own copy"
    assert len(libraries.split()) == 1


def test_wheel_refuses_another_torch(python, tmp_path):
    result = subprocess.run(
        [python, "-c", "import torch; torch.__version__ = '1.0.0'; import torch_ort"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "torch_ort was built for torch" in result.stderr
