"""The benchmarks' models run in the engine as in eager PyTorch. Nothing here depends on speed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from roads import ROADS

import torch_ort

# Those of the README.
MODELS = (
    "mlp", "lm_d64", "lm_d256", "bert", "vit", "llama", "cnn", "resnet18", "unet", "recommender",
)  # fmt: skip
# What is 0 where the engine has run all of a step.
LEFT_TO_EAGER = (
    "fallbacks", "frames_left_to_eager", "graph_breaks", "captures_refused",
    "calls_left_to_eager",
)  # fmt: skip


# Rounding takes a ReLU near zero to either side: of resnet18, eager's own gradients differ by 0.003
# of the largest of a parameter from those in float64, and the engine's by 0.009.
OF_THE_LARGEST = 0.02


def check_first_step(models: ModuleType, name: str, road: str) -> dict[str, int]:
    """Compare loss and gradients of a step with eager's, and give what the step has counted."""
    ours, eager = (models.build(name, "cpu") for _ in range(2))
    before = torch_ort.counters()
    batch = ours.batches[0]
    torch.manual_seed(0)  # of dropout
    loss = ROADS[road](ours.model)(*batch)
    loss.backward()
    torch.manual_seed(0)
    want = eager.model(*batch)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-5)
    for parameter, other in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        atol = max(1e-4, OF_THE_LARGEST * float(other.grad.abs().max()))
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=atol)
    return {key: value - before[key] for key, value in torch_ort.counters().items()}


def test_the_recommender_runs_in_the_engine(load_script):
    counted = check_first_step(load_script("models"), "recommender", "compile")
    assert counted["fallbacks"] == 0
    assert counted["graphs_captured"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", MODELS)
def test_each_model_runs_whole_on_both_roads(
    name: str, road: str, load_script: Callable, monkeypatch, record_property
) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")  # what falls back is counted
    counted = check_first_step(load_script("models"), name, road)
    left = {key: counted[key] for key in LEFT_TO_EAGER}
    record_property("left_to_eager", sum(left.values()))
    assert counted["backward_runs"] == 1
    assert not any(left.values()), left
