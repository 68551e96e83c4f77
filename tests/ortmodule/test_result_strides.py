"""Results lie in memory as in eager PyTorch, however the arguments do, on both roads."""

from __future__ import annotations

import pytest
import torch
from roads import ROADS
from torch import nn
from torch.nn import functional as F

import torch_ort

pytestmark = pytest.mark.ort_only
SHAPE = (2, 4, 6, 8)

LAID = {
    "row-major": lambda: torch.randn(SHAPE),
    "a slice": lambda: torch.randn(2, 4, 12, 8)[:, :, 3:9],
    "a slice of columns": lambda: torch.randn(2, 4, 6, 16)[..., 4:12],
    "every second": lambda: torch.randn(2, 4, 6, 16)[..., ::2],
    "expanded": lambda: torch.randn(2, 4, 1, 8).expand(SHAPE),
    "expanded rows": lambda: torch.randn(4, 6, 8).expand(SHAPE),
    "transposed": lambda: torch.randn(2, 4, 8, 6).mT,
    "batch inside": lambda: torch.randn(4, 2, 6, 8).transpose(0, 1),
    "permuted": lambda: torch.randn(8, 2, 6, 4).permute(1, 3, 2, 0),
    "channels last": lambda: torch.randn(SHAPE).to(memory_format=torch.channels_last),
    "a slice of channels last": lambda: (
        torch.randn(2, 8, 6, 8).to(memory_format=torch.channels_last)[:, :4]
    ),
    "every second of transposed": lambda: torch.randn(2, 4, 16, 6).mT[..., ::2],
    "nothing": lambda: torch.randn(2, 4, 0, 8),
}  # fmt: skip

FUNCTIONS = {
    "product": lambda x: x * 2,
    "broadcast sum": lambda x: x + x[:1, :1],
    "compare": lambda x: x > 0,
    "cast": lambda x: x.double(),
    "clone": lambda x: x.clone(),
    "written into": lambda x: x.clone().add_(1),
    "transposed": lambda x: x.transpose(1, 2).exp(),
    "slice": lambda x: x[:, 1:3].exp(),
    "view": lambda x: x[:, 1:3],
    "flipped": lambda x: x.flip(1),
    "rolled": lambda x: x.roll(1, 1),
    "joined": lambda x: torch.cat([x, x], 1),
    "stacked": lambda x: torch.stack([x, x], 1),
    "padded": lambda x: F.pad(x, (1, 1)),
    "reduced": lambda x: x.sum(1),
    "softmax": lambda x: x.softmax(1),
    "cumulative": lambda x: x.cumsum(1),
    "sorted": lambda x: x.sort(1).values,
    "indexed": lambda x: x[..., [1, 0]],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "like": lambda x: torch.ones_like(x) + x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last) * 2,
    "unfolded": lambda x: x.unfold(3, 2, 2) * 2,
    "linear": lambda x: F.linear(x, torch.ones(3, 8)),
}  # fmt: skip
OF_IMAGES = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "mean pool": lambda x: F.avg_pool2d(x, 2),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "convolution": lambda x: F.conv2d(x, torch.ones(3, 4, 3, 3)),
    "resized": lambda x: F.interpolate(x, scale_factor=2.0),
}


# An ORTModule takes an expanded argument for a dense one in the order of its other dims, so that
# eager's order of the dims of an elementwise result of its transpose is not known.
UNKNOWN = {("ortmodule", "expanded", "transposed")}


class All(nn.Module):
    """Applies all functions to an argument, and to a product with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        functions = FUNCTIONS if x.shape[2] == 0 else FUNCTIONS | OF_IMAGES
        return {
            (name, is_watched): function(x * self.weight if is_watched else x)
            for name, function in functions.items()
            for is_watched in (False, True)
        }


def form(tensor):
    """Give the strides that count: those of dims that have more than one place."""
    counts = tensor.numel() > 0
    strides = [
        stride if counts and size > 1 else None
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad


@pytest.mark.parametrize("asks", [False, True], ids=["data", "requires grad"])
@pytest.mark.parametrize("road", ROADS)
@torch._dynamo.config.patch(recompile_limit=len(LAID))
def test_results_have_the_strides_of_eager_pytorch(road, asks):
    torch.manual_seed(0)
    eager = All()
    ours = ROADS[road](eager)
    wrong = []
    for name, lay in LAID.items():
        x = lay().requires_grad_(asks)
        got, want = ours(x), eager(x)
        for key, right in want.items():
            is_known = (road, name, key[0]) not in UNKNOWN
            if is_known and form(got[key]) != form(right):
                wrong.append((name, key, form(got[key]), form(right)))
            torch.testing.assert_close(got[key], right, rtol=1e-4, atol=1e-4)
    assert wrong == []
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["calls_left_to_eager"] == 0
    assert counters["recordings_handed_over"] == 0
