"""What the machine can do at most: measured, with no word on how much that is."""

from __future__ import annotations

import math

import pytest
import torch
from regions import BUILT_ISAS

from torch_ort import _C, UserError

ISAS = _C.isa_names()


@pytest.mark.parametrize("isa", ["", *ISAS])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_peak(dtype: str, isa: str) -> None:
    peak = _C.measure_peak(dtype, isa)
    assert math.isfinite(peak)
    assert peak > 0


@pytest.mark.parametrize("num_bytes", [1, 4096, 1 << 20, 1 << 40])
def test_copy(num_bytes: int) -> None:
    speed = _C.measure_copy(num_bytes)
    assert math.isfinite(speed)
    assert speed > 0


def test_threads_stay_as_they_are() -> None:
    for threads in (2, 1):
        torch.set_num_threads(threads)
        for asked in range(threads + 1):
            assert _C.measure_peak("float32", threads=asked) > 0
            assert _C.measure_copy(4096, threads=asked) > 0
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("float32", "sse9"), f"isa: got 'sse9', want one of {', '.join(BUILT_ISAS)}"),
        (("int64",), "peak: dtype: got int64, want one of float32, float64, bfloat16, float16"),
        (("float32", "", 3), "peak: threads: got 3, want 1 to 2, or 0 for all"),
        (("float32", "", -1), "peak: threads: got -1, want 1 to 2, or 0 for all"),
    ],
)
def test_wrong_arguments(arguments: tuple, words: str) -> None:
    torch.set_num_threads(2)
    with pytest.raises(UserError, match=words):
        _C.measure_peak(*arguments)


def test_nothing_to_copy() -> None:
    with pytest.raises(UserError, match="peak: bytes: got 0, want 1 or more"):
        _C.measure_copy(0)
