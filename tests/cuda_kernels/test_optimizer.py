"""Kernels of optimizers as machine code. What they compute is tested by
tests/torch_ort/test_optim_on_cuda.py.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from gate import compile_texts, faults
from in_process import environment
from own_process import run_python

from torch_ort import _C

pytestmark = pytest.mark.cuda

TESTS = Path(__file__).parents[1]

# Rule, dtypes of parameter, gradient and states; how many accesses of 16 bytes there are at least.
STEPS = [
    ("sgd", ["float32", "float32"], 2, 1),
    ("sgd", ["bfloat16", "float32", "float32"], 5, 3),
    ("adam", ["float32"] * 4, 4, 3),
    ("adam", ["bfloat16", "bfloat16", "float32", "float32"], 6, 5),
    ("adam", ["bfloat16", "float32", "float32", "float32"], 7, 5),
    ("adam", ["float16"] * 5, 5, 4),
    ("adam", ["bfloat16", "bfloat16", "float32", "float32", "float32"], 8, 7),
    ("adam", ["float64"] * 4, 4, 3),
    ("lamb", ["float32"] * 4, 7, 3),
    ("lamb", ["float16", "float16", "float32", "float32"], 11, 5),
]


def test_good_machine_code():
    """No spill and no local memory, and accesses of 16 bytes."""
    texts, wide = {}, {"begin_step": (0, 0)}
    for rule, dtypes, loads, stores in STEPS:
        begin, squares, update = _C.optimizer_texts(rule, dtypes)
        wide |= {squares[0]: (1, 0), update[0]: (loads, stores)}
        texts |= dict([begin, squares, update])
    assert len(texts) == 1 + 4 + len(STEPS)
    for built in compile_texts(texts):
        assert faults(built, *wide[built.name]) == []


def test_texts_are_dumped(tmp_path):
    code = textwrap.dedent("""
        from emulated import cuda_device
        if cuda_device.is_possible():  # before torch is imported
            cuda_device.activate()
            cuda_device.use_driver()
        import torch
        import torch_ort.optim
        weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
        weight.grad = torch.ones_like(weight)
        torch_ort.optim.SGD([weight], lr=0.5).step()
        print(weight.tolist())
    """)
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS))),
        "TORCH_ORT_DUMP": "cuda",
        "TORCH_ORT_DUMP_DIR": str(tmp_path / "texts"),
    }
    done = run_python("-c", code, env=environment(fake=False, **variables))
    assert (done.returncode, done.stdout) == (0, "[0.5, 0.5, 0.5]\n"), done.stderr
    begin, _, update = _C.optimizer_texts("sgd", ["float32", "float32"])
    texts = {path.stem: path.read_text() for path in (tmp_path / "texts").iterdir()}
    assert texts == dict([begin, update])
