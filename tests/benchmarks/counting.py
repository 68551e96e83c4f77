# What steps of the benchmarks' models cost in numbers that do not depend on time.
#
# As a script: `counting.py MODEL...` prints them as JSON, by model. The caller's environment says
# what the numbers may depend on.
from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

import torch_ort
from torch_ort import _C

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from models import build

SETTLED_AFTER = 3  # steps: the first ones grow the arena


def count(name: str) -> dict[str, int]:
    torch._dynamo.reset()
    gc.collect()  # what is left of another model holds memory of the engine
    torch_ort.empty_cache()
    torch_ort.reset_counters()
    workload = build(name, "cpu")
    model = torch.compile(workload.model, backend="ort")
    for batch in workload.batches[:SETTLED_AFTER]:
        model(*batch).backward()
    settled = torch_ort.counters()
    model(*workload.batches[SETTLED_AFTER]).backward()
    after = torch_ort.counters()
    return {
        "graphs": after["graphs_captured"],
        "nodes": after["nodes"],
        "plans": after["plans"],
        "kernel_calls": after["steps_run"] - settled["steps_run"],
        "regions": after["steps_region"] - settled["steps_region"],
        "arena_bytes": after["arena_bytes"],
    }


if __name__ == "__main__":
    _C.testing.plant_codegen("few_registers")  # passes choose as on a processor with AVX2
    print(json.dumps({name: count(name) for name in sys.argv[1:]}))
