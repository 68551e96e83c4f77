"""What a GPU can do at most is measured on large random data, between two events."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort.reports import peaks

pytestmark = [pytest.mark.ort_only, pytest.mark.cuda]

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Take little time on the test device."""
    monkeypatch.setattr(peaks, "_SECONDS", 1e-3)
    monkeypatch.setattr(peaks, "_SIDES", dict.fromkeys(peaks.DTYPES, 256))
    monkeypatch.setattr(peaks, "_SMALLEST_SIDE", 32)
    monkeypatch.setattr(peaks, "_COPIED_BYTES", 1 << 20)


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """List the numbers of elements that are drawn."""
    drawn: list[int] = []

    def watch(name: str) -> None:
        make = getattr(torch, name)

        def made(*args, **kwargs):
            result = make(*args, **kwargs)
            drawn.append(result.numel())
            return result

        monkeypatch.setattr(torch, name, made)

    watch("randn")
    watch("randint")
    return drawn


def test_products(sizes):
    found = peaks.product_peaks(["float32", "bfloat16"], CUDA, "")
    assert found.where == "cuda"
    assert list(found.flops) == ["float32", "bfloat16"]
    assert all(rate > 0 for rate in found.flops.values())
    assert sizes == [256 * 256] * 4


def test_copies(sizes):
    assert peaks.copy_speed(100, CUDA) > 0
    assert sizes == [1 << 20]


def test_little_memory(sizes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 16, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 16)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 << 16)
    assert peaks.copy_speed(100, CUDA) > 0
    # Three matrices of float32 in half of 128 KiB.
    assert peaks.product_peaks(["float32"], CUDA, "").flops["float32"] > 0
    assert sizes == [1 << 15, 64 * 64, 64 * 64]


def test_products_are_of_their_dtype_under_autocast(monkeypatch):
    computed = []
    product = torch.mm

    def watched(one, two, out):
        computed.append((one.dtype, out.dtype, torch.is_autocast_enabled("cuda")))
        return product(one, two, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    with torch.autocast("cuda", torch.bfloat16):
        peaks.product_peaks(["float32"], CUDA, "")
    assert set(computed) == {(torch.float32, torch.float32, False)}
    assert len(computed) >= 2 + peaks._BATCHES


def test_time_is_that_of_one_of_many_runs(monkeypatch):
    runs = []
    monkeypatch.setattr(peaks, "_between_events", lambda run, times: runs.append(times) or 2e-4)
    assert peaks._seconds_on_device(lambda: None, CUDA) == 2e-4
    assert runs == [1, 5, 5, 5]


def test_generators_and_allocated_memory_stay_as_they_are():
    # A library's workspace is allocated by the first product of a process, and stays.
    peaks.product_peaks(["float32"], CUDA, "")
    state, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    peaks.product_peaks(["float32"], CUDA, "")
    peaks.copy_speed(100, CUDA)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() == allocated


def test_the_least_time_of_a_step():
    model, x = nn.Linear(64, 32).cuda(), torch.randn(16, 64, device="cuda")
    roofline = torch_ort.explain(model, x, roofline=True).roofline
    assert roofline.flops == {"float32": 2 * 2 * 16 * 64 * 32}
    assert roofline.peaks.flops["float32"] > 0
    assert roofline.bytes_per_second > 0
