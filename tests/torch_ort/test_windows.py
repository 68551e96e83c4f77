"""Spectra and windows of signals: stft, istft, unfold, fold, as_strided, and their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort
from tests.roads import ROADS
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.linear(x.view(-1, 8)).view(2, 64))


def spectrum(y, **options):
    window = torch.hann_window(16, dtype=y.dtype)
    return torch.stft(y, 16, 4, window=window, return_complex=True, **options)


def signal(z, **options):
    return torch.istft(z, 16, 4, window=torch.hann_window(16, dtype=z.real.dtype), **options)


LOSSES = {
    "stft": lambda y: spectrum(y).abs().square().sum(),
    "istft": lambda y: signal(spectrum(y) * 2).square().sum(),
    "istft of a length": lambda y: signal(spectrum(y), length=60).square().sum(),
    "istft, a method": lambda y: (
        spectrum(y).istft(16, 4, window=torch.hann_window(16, dtype=y.dtype)).square().sum()
    ),
    "a mask on the spectrum": lambda y: (
        signal(spectrum(y) * torch.sigmoid(spectrum(y).abs())).square().sum()
    ),
    "twice": lambda y: signal(spectrum(signal(spectrum(y)) * 2)).square().sum(),
    "unfold": lambda y: y.unfold(1, 4, 2).square().sum(),
    "windows that are added": lambda y: (
        F.fold(F.unfold(y.view(1, 2, 8, 8), 3) * 2, (8, 8), 3).square().sum()
    ),
    "as_strided": lambda y: y.as_strided((2, 31, 4), (64, 2, 1)).square().sum(),
    "written, then istft": lambda y: signal(spectrum(y.clone().mul_(2))).square().sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", LOSSES)
def test_training(road, name, dtype):
    torch.manual_seed(0)
    eager = Model(LOSSES[name]).to(dtype)
    model = copy.deepcopy(eager)
    call = ROADS[road](model)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, 64, dtype=dtype)
        got, want = call(x), eager(x)
        torch.testing.assert_close(got, want)
        got.backward()
        want.backward()
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in eager.parameters()],
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["backward_runs"] == 3


def write(y):
    y = y.clone()
    y.unfold(1, 4, 8).mul_(2)
    return y


@pytest.mark.hands_over("functionalization gets these writes wrong")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("after", [lambda y: y.square().sum(), lambda y: signal(spectrum(y)).sum()])
def test_writes_into_windows_are_left_to_pytorch(road, after, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager = Model(lambda y: after(write(y)))
    call = ROADS[road](eager)
    x = torch.randn(2, 64)
    with pytest.warns(FallbackWarning, match="forward writes into what unfold gave"):
        got = call(x)
    torch.testing.assert_close(got, eager(x))
