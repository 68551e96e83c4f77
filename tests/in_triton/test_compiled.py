"""Kernels of Triton as machine code for GPUs, which its compiler makes without one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs the package triton"
    ),
]

# Triton must not have been imported with its interpreter.
_PROGRAM = """
import torch, triton
from torch import nn
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from torch_ort.triton import kernels, printer, writer

bodies = []
kernels.why_not = lambda device: ""
writer._Writer.__call__ = lambda self, body: bodies.append(
    {key: each for key, each in body.items() if key != "graph"}
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, ids, labels):
        hidden = F.silu(self.layer(self.embed(ids))).flatten(0, 1)
        return F.cross_entropy(self.head(hidden), labels.flatten())


ids = torch.randint(50, (3, 11))
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    torch.compiler.reset()
    torch.compile(Net().to(dtype), backend="ort")(ids, ids).backward()


class Gpu:
    # What Triton asks of the driver of a GPU, up to a launch. The device is the capability.

    def __init__(self, capability):
        self.get_current_device = lambda: capability
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_stream = lambda device: 0


made = 0
for capability in (80, 90, 100):
    triton.runtime.driver.set_active(Gpu(capability))
    for body in bodies:
        text = printer.Printer(body).write()
        kernel = kernels.Kernel({**body, "device": "cuda"}, text)
        functions = [kernel._module.region]
        functions += [getattr(kernel._module, f"sums{i}") for i in range(len(text.sums))]
        for function in functions:
            (built,) = function.device_caches[capability][0].values()
            made += len(built.asm["cubin"]) > 0
print(len(bodies), made)
"""


def test_regions_of_a_training_step(tmp_path):
    environment = {**os.environ, "ORTMODULE_USE_TRITON": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    regions, cubins = map(int, done.stdout.split())
    assert regions > 20
    assert cubins > 3 * regions
