"""Quantization-aware training, binary networks, pruning."""

from __future__ import annotations

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F


class Rounds(torch.autograd.Function):
    """Rounds to a grid; the gradient passes where nothing was clipped (straight through)."""

    @staticmethod
    def forward(ctx, x, scale, low, high):
        grid = x / scale
        ctx.save_for_backward((grid >= low) & (grid <= high))
        return grid.round().clamp(low, high) * scale

    @staticmethod
    def backward(ctx, gradient):
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None


class QuantizedLinear(nn.Linear):
    """Rounds its weights by their largest, and its input by a moving average of the largest."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.largest.lerp_(x.detach().abs().amax(), 0.1)
        x = Rounds.apply(x, self.largest / 127, -128, 127)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        return F.linear(x, Rounds.apply(self.weight, scale, -8, 7), self.bias)


def train_classifier(wrap, model, optimizer, features=8, classes=3):
    compiled = wrap(model)
    for _ in range(STEPS):
        loss = F.cross_entropy(compiled(torch.randn(6, features)), torch.randint(classes, (6,)))
        update(optimizer, loss)
        yield loss
    return model


# Roundings are jumps: what lies next to one may fall to either side in the last bits.
@program(quick=True, rtol=2e-2, atol=1e-2)
def weights_rounded_by_a_function(wrap):
    model = nn.Sequential(QuantizedLinear(8, 16), nn.ReLU(), QuantizedLinear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return (yield from train_classifier(wrap, model, optimizer))


class FakeQuantized(nn.Module):
    """PyTorch's own operators of fake quantization, with steps that are learned (LSQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor([0.05]))
        self.register_buffer("zero", torch.zeros(1))
        self.register_buffer("scales", torch.full((3,), 0.02))
        self.register_buffer("zeros", torch.zeros(3, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        h = torch._fake_quantize_learnable_per_tensor_affine(h, self.scale, self.zero, 0, 255, 0.1)
        weight = torch.fake_quantize_per_channel_affine(
            self.second.weight, self.scales, self.zeros, 0, -128, 127
        )
        return F.linear(h, weight, self.second.bias)


@program(rtol=2e-2, atol=1e-2)
def learned_steps(wrap):
    model = FakeQuantized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return (yield from train_classifier(wrap, model, optimizer))


class Observed(nn.Module):
    """Observers of torch.ao, whose buffers take their sizes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import (
            FakeQuantize,
            MovingAverageMinMaxObserver,
            MovingAveragePerChannelMinMaxObserver,
        )

        self.of_x = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.of_weight = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric, ch_axis=0,
        )  # fmt: skip
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.of_x(self.first(x).relu())
        return F.linear(h, self.of_weight(self.second.weight), self.second.bias)


@program(rtol=2e-2, atol=1e-2)
def observers(wrap):
    model = Observed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return (yield from train_classifier(wrap, model, optimizer))


class Binary(nn.Linear):
    """Signs of weights, with the straight-through trick written by detach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.abs().mean(1, keepdim=True)
        signs = torch.where(self.weight >= 0, scale, -scale)
        smooth = self.weight.clamp(-1, 1)
        return F.linear(x, smooth + (signs - smooth).detach(), self.bias)


@program
def binary_weights(wrap):
    model = nn.Sequential(Binary(8, 16), nn.Hardtanh(), Binary(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return (yield from train_classifier(wrap, model, optimizer))


@program
def pruning_while_training(wrap):
    """torch.nn.utils.prune makes weights the product of a parameter and a mask, by a hook."""
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == 4:
            prune.l1_unstructured(model[0], "weight", amount=0.5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = F.cross_entropy(compiled(torch.randn(6, 8)), torch.randint(3, (6,)))
        update(optimizer, loss)
        yield loss
    return model
