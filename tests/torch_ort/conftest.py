# What tests of this room share.
from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest

from torch_ort import _C


@pytest.fixture(params=_C.isa_names())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have optimizers that are made in the test run with each instruction set."""
    monkeypatch.setenv("TORCH_ORT_ISA", request.param)
    return request.param


@pytest.fixture(scope="module")
def kept_memory() -> Iterator[None]:
    """Have malloc keep large blocks that are freed.

    Else each block of tens of megabytes goes back to the kernel, and comes again as pages of zeros,
    which takes longer than what such tests compute.
    """
    malloc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(malloc, "mallopt"):
        yield
        return
    most_mapped_blocks, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of <malloc.h>
    malloc.mallopt(most_mapped_blocks, 0)
    malloc.mallopt(trim_threshold, 2**31 - 1)
    yield
    malloc.mallopt(most_mapped_blocks, 65536)
    malloc.mallopt(trim_threshold, 128 * 1024)
    malloc.malloc_trim(0)
