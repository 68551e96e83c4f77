"""The benchmarks' models run in the engine as in eager PyTorch. Nothing here depends on speed."""

import importlib.util
import sys
from pathlib import Path

import torch

import torch_ort

FILE = Path(__file__).parents[2] / "benchmarks" / "models.py"


def test_the_recommender_runs_in_the_engine(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_models", FILE)
    models = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, models)  # dataclasses look there
    spec.loader.exec_module(models)
    ours, eager = (models.build("recommender", "cpu") for _ in range(2))
    call, before = torch.compile(ours.model, backend="ort"), torch_ort.counters()
    batch = ours.batches[0]
    loss, want = call(*batch), eager.model(*batch)
    torch.testing.assert_close(loss, want)
    loss.backward()
    want.backward()
    for parameter, other in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    after = torch_ort.counters()
    assert after["fallbacks"] == before["fallbacks"]
    assert after["graphs_captured"] - before["graphs_captured"] == 1
