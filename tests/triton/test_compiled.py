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
from triton.compiler import ASTSource
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

KINDS = {"float32": "fp32", "float64": "fp64", "bfloat16": "i16", "float16": "fp16", "bool": "u8",
         "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64"}
made = 0
for body in bodies:
    text = printer.Printer(body).write()
    module = kernels.module_of(text.source)
    outputs = {each["to"]["result"]: "*" + KINDS[each["to"]["dtype"]]
               for each in [*body["stores"], *body["sums"]]}
    lines = "*fp64" if text.is_double else "*fp32"
    signature = {f"in{i}": "*" + KINDS[each["dtype"]] for i, each in enumerate(body["inputs"])}
    signature |= {f"out{i}": outputs[i] for i in range(len(body["output_names"]))}
    signature |= {f"lines{i}": lines for i in range(len(text.sums))} | {"faults": "*i32"}
    sources = [ASTSource(module.region, signature, {})]
    for i, each in enumerate(text.sums):
        of = {"lines": lines, "out": outputs[each.output]}
        sources.append(ASTSource(getattr(module, f"sums{i}"), of, {}))
    for source in sources:
        for capability in (80, 90, 100):
            made += len(triton.compile(source, GPUTarget("cuda", capability, 32)).asm["cubin"]) > 0
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
