"""Diffusion, flows, and other models of a distribution."""

from __future__ import annotations

import copy
import math

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F


def time_features(t: torch.Tensor, width: int = 8) -> torch.Tensor:
    speeds = torch.exp(-math.log(1000) * torch.arange(width // 2) / (width // 2))
    angles = t.float().unsqueeze(-1) * speeds
    return torch.cat([angles.sin(), angles.cos()], -1)


class NoisePredictor(nn.Module):
    """Its norms are scaled and shifted by the time and by a class, which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 32))
        self.classes = nn.Embedding(4, 32)
        self.inputs, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.outputs = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        known = self.time(time_features(t)) + self.classes(label)
        scale, shift = known[..., None, None].chunk(2, 1)
        h = F.silu(self.norm(self.inputs(x)) * (1 + scale) + shift)
        tokens = h.flatten(2).mT
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.outputs(tokens.mT.view_as(h))


@program(quick=True)
def diffusion_with_guidance_and_averages(wrap):
    model = NoisePredictor()
    compiled = wrap(model)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    for step in range(STEPS):
        x, t, noise = torch.rand(4, 1, 4, 4), torch.randint(100, (4,)), torch.randn(4, 1, 4, 4)
        label = torch.randint(3, (4,)).masked_fill(torch.rand(4) < 0.2, 3)
        a = kept[t].view(-1, 1, 1, 1)
        found = compiled(a.sqrt() * x + (1 - a).sqrt() * noise, t, label)
        loss = F.mse_loss(found, noise)
        update(optimizer, loss)
        decay = min(0.99, (1 + step) / (10 + step))
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast.detach(), 1 - decay)
        yield loss
    return model, average


@program
def flow_matching(wrap):
    model = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x0, x1, t = torch.randn(16, 2), torch.randn(16, 2) * 0.3 + 1, torch.rand(16, 1)
        v = compiled(torch.cat([torch.lerp(x0, x1, t), t], -1))
        loss = (v - (x1 - x0)).square().mean()
        update(optimizer, loss)
        drift = torch.zeros(())
        if step % 4 == 3:  # draws samples by some steps of Euler's
            compiled.eval()
            with torch.no_grad():
                x = torch.randn(5, 2)
                for i in range(4):
                    x = x + compiled(torch.cat([x, torch.full((5, 1), i / 4)], -1)) / 4
            compiled.train()
            drift = x.mean()
        yield loss, drift
    return model


class Coupling(nn.Module):
    """A half of the features scales and shifts the other half."""

    def __init__(self, flips: bool) -> None:
        super().__init__()
        self.flips = flips
        self.network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flips else (a, b)
        log_scale, shift = self.network(a).chunk(2, -1)
        log_scale = log_scale.tanh()
        b = b * log_scale.exp() + shift
        return torch.cat([b, a] if self.flips else [a, b], -1), log_scale.sum(-1)


class ActNorm(nn.Module):
    """Takes its scale from the first batch that it sees, as a flag in a buffer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.shift = (nn.Parameter(torch.zeros(4)) for _ in range(2))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_set:
            with torch.no_grad():
                self.log_scale.copy_(-(x.std(0) + 1e-6).log())
                self.shift.copy_(-x.mean(0))
                self.is_set.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Flow(nn.Module):
    def __init__(self, with_norms: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for i in range(3):
            self.parts += (
                [ActNorm(), Coupling(i % 2 == 1)] if with_norms else [Coupling(i % 2 == 1)]
            )
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(x.shape[0])
        for part in self.parts:
            x, log_determinant = part(x)
            total = total + log_determinant
        base = torch.distributions.Independent(torch.distributions.Normal(self.mean, 1.0), 1)
        return base.log_prob(x) + total


def train_flow(wrap, with_norms):
    model = Flow(with_norms)
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss = -compiled(torch.randn(8, 4) * 0.5 + 1).mean()
        update(optimizer, loss)
        yield loss
    return model


@program
def flow_by_couplings(wrap):
    return (yield from train_flow(wrap, with_norms=False))


@program
def flow_with_norms_that_start_from_data(wrap):
    return (yield from train_flow(wrap, with_norms=True))


class Spline(nn.Module):
    """A monotone spline: bins are found by searchsorted."""

    def __init__(self, bins: int = 6) -> None:
        super().__init__()
        self.widths, self.heights = (nn.Parameter(torch.randn(bins) * 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, h = self.widths.softmax(0), self.heights.softmax(0)
        left, low = F.pad(w.cumsum(0), (1, 0)), F.pad(h.cumsum(0), (1, 0))
        bins = torch.searchsorted(left.detach(), x.detach().contiguous(), right=True) - 1
        bins = bins.clamp(0, len(w) - 1)
        slope = h[bins] / w[bins]
        return low[bins] + (x - left[bins]) * slope, slope.log().sum(-1)


@program
def flow_by_a_spline(wrap):
    model = Spline()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        y, log_determinant = compiled(torch.rand(8, 3))
        loss = (y - 0.5).square().mean() - 0.1 * log_determinant.mean()
        update(optimizer, loss)
        yield loss
    return model


class Discrete(nn.Module):
    """Codes of categories by Gumbel's trick; the loop lowers the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 12), nn.Linear(12, 8)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.encoder(x).unflatten(-1, (3, 4))
        noise = -torch.log(-torch.log(torch.rand_like(logits) + 1e-9) + 1e-9)
        soft = ((logits + noise) / self.temperature).softmax(-1)
        q = logits.softmax(-1)
        kl = (q * (q * 4 + 1e-9).log()).sum((-1, -2)).mean()
        return F.mse_loss(self.decoder(soft.flatten(1)), x) + 0.1 * kl


@program
def gumbel_with_a_falling_temperature(wrap):
    model = Discrete()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model.temperature = max(0.3, math.exp(-0.2 * step))
        loss = compiled(torch.randn(8, 8))
        update(optimizer, loss)
        yield loss
    return model


@program
def energies_by_langevin_samples(wrap):
    """Negative samples follow the gradient with respect to the input."""
    model = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 1))
    energy = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        sample = torch.randn(8, 2)
        for _ in range(3):
            sample = sample.detach().requires_grad_()
            (slope,) = torch.autograd.grad(energy(sample).sum(), sample)
            sample = sample - 0.1 * slope + 0.02 * torch.randn_like(sample)
        real, fake = energy(torch.randn(8, 2) + 1), energy(sample.detach())
        loss = real.mean() - fake.mean() + 0.1 * (real.square() + fake.square()).mean()
        update(optimizer, loss)
        yield loss
    return model


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh())
        self.weights, self.means, self.scales = (nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        parts = torch.distributions.Normal(self.means(h), self.scales(h).exp())
        weights = torch.distributions.Categorical(logits=self.weights(h))
        mixture = torch.distributions.MixtureSameFamily(weights, parts)
        return -mixture.log_prob(y).mean()


@program
def mixture_of_densities(wrap):
    model = MixtureDensity()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        loss = compiled(torch.randn(8, 3), torch.randn(8))
        update(optimizer, loss)
        yield loss
    return model
