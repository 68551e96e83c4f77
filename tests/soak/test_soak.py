# A short soak; `make soak` is the long one. The resident set takes thousands of steps to settle.
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from soak import Measure, grown, soak

pytestmark = pytest.mark.hands_over("calls that raise are part of a soak")


@pytest.fixture(autouse=True)
def loose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")  # errors of the model's own come as they are
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def test_a_short_soak_is_flat():
    assert grown(soak("ortmodule", 120, 5), ["tensors", "contexts"]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("road", "steps"), [("ortmodule", 3000), ("compile", 1000)])
def test_a_soak_is_flat(road: str, steps: int):
    assert grown(soak(road, steps, 50), ["tensors", "contexts"]) == []


def test_what_grows_is_named():
    flat = [Measure(1000, 100, 2)] * 9
    leaking = [Measure(1000 + 10 * i, 100 + i, 2) for i in range(9)]
    assert grown(flat) == []
    assert [said.split(":")[0] for said in grown(leaking)] == ["resident", "tensors"]
