"""Modules with one channel: a layer fixes a size of 1, which others may have by chance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_ort

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(1), (1, 5, 3)),
    "batch norm, convolution": (
        lambda: nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3)), (1, 5, 5),
    ),
    "batch norm of rows": (lambda: nn.BatchNorm1d(1), (1,)),
    "group norm": (lambda: nn.GroupNorm(1, 1), (1, 5, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(1, affine=True), (1, 5, 3)),
    "layer norm": (lambda: nn.LayerNorm(1), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_one_channel(name: str, is_training: bool) -> None:
    make, size = LAYERS[name]
    torch.manual_seed(0)
    module = make().train(is_training)
    call = torch_ort.ORTModule(module)
    for rows in (4, 2, 7):
        x = torch.randn(rows, *size)
        state = {key: value.clone() for key, value in module.state_dict().items()}
        results = []
        for run in (module, call):
            module.load_state_dict(state)
            module.zero_grad()
            y = run(x)
            y.square().sum().backward()
            results.append([y.detach(), *(each.grad.clone() for each in module.parameters())])
        torch.testing.assert_close(results[1], results[0])
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 1
    assert counters["recorder_bugs"] == counters["recordings_handed_over"] == 0
