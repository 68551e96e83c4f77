# What tests of this room share.
from __future__ import annotations

import pytest

from torch_ort import _C


@pytest.fixture(params=_C.isa_names())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have optimizers that are made in the test run with each instruction set."""
    monkeypatch.setenv("TORCH_ORT_ISA", request.param)
    return request.param
