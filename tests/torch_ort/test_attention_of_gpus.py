"""Attention kernels of a GPU under the engine: flash for halves, else the efficient one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ort

pytestmark = pytest.mark.cuda


@pytest.fixture
def device() -> str:
    return "cuda"


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0, has_mask: bool = False, shared: bool = True) -> None:
        super().__init__()
        self.dropout, self.has_mask, self.shared = dropout, has_mask, shared
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, 2) if self.shared else (x, x.sin(), x.cos())
        q, k, v = (y.view(batch, length, 2, -1).transpose(1, 2) for y in parts)
        mask = None
        if self.has_mask:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=not self.has_mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"dropout": 0.2}, {"has_mask": True}, {"shared": False}],
    ids=["causal", "dropout", "mask", "apart"],
)
def test_trains_like_eager(compare_training, dtype, settings):
    compare_training(
        lambda: Attention(**settings).to(dtype),
        lambda step: torch.randn(3, 10 + step, 32, dtype=dtype, requires_grad=True),
    )
    counters = torch_ort.counters()
    assert counters["graphs_recorded"] == counters["graphs_captured"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_cudnn_where_pytorch_prefers_it(compare_training, dropout, dtype):
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    compare_training(
        lambda: Attention(dropout).to(dtype),
        lambda step: torch.randn(3, 10 + step, 32, dtype=dtype, requires_grad=True),
        forward_context=lambda: sdpa_kernel(order, set_priority=True),
    )
    counters = torch_ort.counters()
    assert counters["graphs_recorded"] == counters["graphs_captured"]


def test_under_autocast(compare_training):
    compare_training(
        Attention,
        lambda step: torch.randn(3, 10, 32, requires_grad=True),
        forward_context=lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        # eager rounds gradients of weights to bfloat16
        rtol=1.6e-2,
        atol=1e-3,
    )


@pytest.mark.parametrize("pack", ["clone", "host"])
def test_random_state_on_the_host_goes_through_saved_tensor_hooks(compare_training, pack):
    """The efficient kernel reads on the host where its random numbers began."""

    def hooks():
        if pack == "host":
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x)

    # Of 16 positions the mask needs no gaps between its rows, which packing would close: the kernel
    # refuses rows that are not aligned.
    compare_training(
        lambda: Attention(dropout=0.2, has_mask=True),
        lambda step: torch.randn(3, 16, 32, requires_grad=True),
        forward_context=hooks,
    )
    assert torch_ort.counters()["fallbacks"] == 0
