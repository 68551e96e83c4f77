"""Small models of the usual kinds, for tests that take whole models, and modules of few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def module_with(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """Give a module whose forward is `forward(self, ...)`, with parts by name.

    A tensor becomes a buffer.
    """
    made = type("Module", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        heads = [part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.before_feed_forward(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(23, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(EncoderBlock(16, 2, True), EncoderBlock(16, 2, True))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x))).log_softmax(-1)


def cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
        nn.Softmax(-1),
    )
    with torch.no_grad():
        for norm in (model[1], model[5]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model


def mlp() -> nn.Module:
    layers = [nn.Linear(6, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 4), nn.Sigmoid())


def floats(*shape: int) -> torch.Tensor:
    """Give normal numbers that depend on the shape alone."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator)


MODELS = {
    "MLP": (mlp, floats(5, 6)),
    "CNN": (cnn, floats(2, 3, 8, 8)),
    "encoder block": (lambda: EncoderBlock(16, 4, False), floats(2, 7, 16)),
    "causal language model": (LanguageModel, torch.arange(18).reshape(2, 9)),
}
