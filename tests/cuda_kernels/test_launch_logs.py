"""The launches of training steps of three models (golden/*.launches): kernels by name, grid, block,
and bytes of shared memory. No number of them comes from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import golden
import pytest
import torch
from emulated import cuda_device
from torch import nn
from torch.nn import functional as F

import torch_ort

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not cuda_device.is_active(), reason="the fake driver writes the log"),
]
WIDTH, HEADS, LENGTH, WORDS = 64, 4, 24, 50


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = F.dropout(self.words(ids) + self.places(places), 0.1)
        logits = self.head(self.norm(self.layers(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Its norms are one operator each on a GPU, and regions all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(Gated(), Gated())
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.layers(self.words(ids))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.convs[0](x)).relu()
        return (self.norms[1](self.convs[1](y)) + x).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks, self.head = nn.Sequential(Residual(16), Residual(16)), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3))
        labels = torch.arange(len(x), device=x.device)
        return F.cross_entropy(self.head(x), labels)


# A model, the dtype of autocast, and what it is given.
MODELS: dict[str, tuple[type[nn.Module], torch.dtype | None, Callable[[], torch.Tensor]]] = {
    "gpt": (GPT, torch.bfloat16, lambda: torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS),
    "llama": (Llama, torch.bfloat16, lambda: torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS),
    "resnet": (ResNet, None, lambda: torch.arange(4 * 3 * 16 * 16).view(4, 3, 16, 16) / 1024),
}


@pytest.mark.parametrize("name", MODELS)
def test_launches(name: str, tmp_path: Path, monkeypatch, request: pytest.FixtureRequest) -> None:
    make, dtype, given = MODELS[name]
    torch.manual_seed(0)
    model = torch.compile(make().cuda(), backend="ort", options={"exact_random": False})
    log = tmp_path / "log"
    monkeypatch.setenv("EMULATED_CUDA_LOG", str(log))
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(given().cuda())
    with log.open("a") as file:
        file.write("-- backward\n")
    loss.backward()
    torch.cuda.synchronize()
    assert torch_ort.counters()["fallbacks"] == 0
    lines = golden.without_hashes(log.read_text())
    golden.compare(f"{name}.launches", lines, request.config.getoption("--accept"))
