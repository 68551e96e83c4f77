"""Training under emulation: a transformer on both roads, against eager PyTorch in the process."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

TRAIN = """
import copy, json, sys, torch
from torch import nn
import torch_ort

ROAD, DTYPE = {road!r}, {dtype!r}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, ids, labels):
        logits = self.head(self.layer(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train(model, call):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        ids = torch.randint(0, 50, (2, 12))
        with torch.autocast("cpu", torch.bfloat16, enabled=DTYPE == "bfloat16"):
            loss = call(ids, ids.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
eager = Model()
ours = copy.deepcopy(eager)
wrapped = torch_ort.ORTModule(ours) if ROAD == "ortmodule" else torch.compile(ours, backend="ort")
found = dict(eager=train(eager, eager), ours=train(ours, wrapped), isa=torch_ort._C.isa_names())
print(json.dumps(found | torch_ort.counters()))
"""


@pytest.mark.parametrize("road", ["compile", "ortmodule"])
@pytest.mark.parametrize(
    ("dtype", "processor", "tolerance"),
    # A Neoverse N1 does not multiply bfloat16; what qemu calls max does.
    [("float32", "neoverse-n1", 1e-5), ("bfloat16", "max", 3e-2)],
)
def test_losses_are_those_of_eager(road, dtype, processor, tolerance, run_emulated):
    found = json.loads(
        run_emulated(TRAIN.format(road=road, dtype=dtype), QEMU_CPU=processor).splitlines()[-1]
    )
    assert found["isa"] == ["portable", "neon"]
    assert found["fallbacks"] == 0
    assert found["forward_runs"] == found["backward_runs"] == 4
    assert found["ours"] == pytest.approx(found["eager"], rel=tolerance)
    assert found["ours"][-1] < found["ours"][0]


def test_nvrtc_of_pytorchs_wheels_is_found(run_emulated):
    """Hosts of GPUs such as Grace's have PyTorch's builds for CUDA, which bring NVRTC."""
    path = run_emulated("""
from torch_ort import _C
from torch_ort.engine import cuda
cuda.configure()
print(_C.cuda.compiler()[0])
""").strip()
    assert path.endswith("/nvidia/cu13/lib/libnvrtc.so.13")
