"""Tables, recommendations, time series, survival, physics."""

from __future__ import annotations

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F


class Factors(nn.Module):
    """DeepFM: pairs of fields by a formula, and a network beside it; bags of ids of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = nn.ModuleList(nn.Embedding(n, 6) for n in (10, 5, 7))
        self.history = nn.EmbeddingBag(20, 6, mode="mean")
        self.linear, self.bias = nn.Linear(3, 6), nn.Parameter(torch.zeros(()))
        self.deep = nn.Sequential(
            nn.Linear(30, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
        )

    def forward(
        self, ids: torch.Tensor, numbers: torch.Tensor, bag: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        parts = [field(ids[:, i]) for i, field in enumerate(self.fields)]
        parts += [self.history(bag, starts), self.linear(numbers)]
        x = torch.stack(parts, 1)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(-1)
        return pairs + self.deep(x.flatten(1)).squeeze(-1) + self.bias


@program
def clicks(wrap):
    model = Factors()
    compiled = wrap(model)
    # Not Adam: batch norm takes away the bias before it, whose gradient is rounding alone.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        ids = torch.stack([torch.randint(n, (8,)) for n in (10, 5, 7)], 1)
        bag = torch.randint(20, (16 + step % 3,))
        logits = compiled(ids, torch.rand(8, 3), bag, torch.arange(8) * 2)
        target = torch.randint(2, (8,)).float()
        loss = F.binary_cross_entropy_with_logits(logits, target, pos_weight=torch.tensor(2.0))
        update(optimizer, loss)
        yield loss
    return model


class Matrix(nn.Module):
    """Matrix factorization, compared with all other items of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.bias = nn.Embedding(30, 1)
        self.register_buffer("seen", torch.zeros(30))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.index_add_(0, items, torch.ones(items.shape[0]))
        scores = self.users(users) @ self.items(items).T + self.bias(items).T
        scores = scores - (self.seen[items] / self.seen.sum()).log()
        same = items.unsqueeze(0) == items.unsqueeze(1)
        same = same & ~torch.eye(items.shape[0], dtype=torch.bool)
        scores = scores.masked_fill(same, -1e4)
        return F.cross_entropy(scores, torch.arange(items.shape[0]))


@program
def recommendations_with_counts(wrap):
    model = Matrix()
    compiled = wrap(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = compiled(torch.randint(20, (8,)), torch.randint(30, (8,)))
        update(optimizer, loss)
        yield loss
    return model


class Hazards(nn.Module):
    """Survival (Cox): who dies is compared with all who live longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SELU(), nn.AlphaDropout(0.1),
                                    nn.Linear(16, 1, bias=False))  # fmt: skip

    def forward(self, x: torch.Tensor, time: torch.Tensor, died: torch.Tensor) -> torch.Tensor:
        order = time.argsort(descending=True)
        risk = self.layers(x).squeeze(-1)[order]
        terms = risk - risk.logcumsumexp(0)
        return -(terms * died[order]).sum() / died.sum().clamp(min=1)


@program
def survival(wrap):
    model = Hazards()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = compiled(torch.randn(8, 5), torch.rand(8), (torch.rand(8) < 0.7).float())
        update(optimizer, loss)
        yield loss
    return model


class Forecast(nn.Module):
    """Quantiles of the next hours by dilated causal convolutions, on reversibly scaled input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(c, 8, 2, dilation=d) for c, d in ((1, 1), (8, 2)))
        self.head = nn.Linear(8, 4 * 3)
        self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        mean, scale = past.mean(-1, keepdim=True), past.std(-1, keepdim=True) + 1e-5
        x = ((past - mean) / scale).unsqueeze(1)
        for layer in self.layers:
            y = layer(F.pad(x, (layer.dilation[0], 0))).relu()
            x = y + x if x.shape == y.shape else y
        found = self.head(x[..., -1]).unflatten(-1, (4, 3)) * scale.unsqueeze(-1)
        error = future.unsqueeze(-1) - found - mean.unsqueeze(-1)
        return torch.maximum(self.quantiles * error, (self.quantiles - 1) * error).mean()


@program
def forecasts_of_quantiles(wrap):
    model = Forecast()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        loss = compiled(torch.randn(6, 12 + step % 2).cumsum(-1), torch.randn(6, 4))
        update(optimizer, loss)
        yield loss
    return model


class Trees(nn.Module):
    """Soft decision trees: the product of the choices on the way to each leaf."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.depth = depth
        self.choices = nn.Linear(6, 2**depth - 1)
        self.leaves = nn.Parameter(torch.randn(2**depth, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        right = self.choices(x).sigmoid()
        p = x.new_ones(x.shape[0], 1)
        for level in range(self.depth):
            r = right[:, 2**level - 1 : 2 ** (level + 1) - 1]
            p = torch.stack([p * (1 - r), p * r], -1).flatten(1)
        return p @ self.leaves


@program
def soft_trees(wrap):
    model = Trees()
    compiled = wrap(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = F.cross_entropy(compiled(torch.randn(8, 6)), torch.randint(2, (8,)))
        update(optimizer, loss)
        yield loss
    return model


class Dynamics(nn.Module):
    """A differential equation, by Runge and Kutta's method in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, start: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        states = [start]
        for h in times.diff():
            y = states[-1]
            k1 = self.slope(y)
            k2 = self.slope(y + h * k1 / 2)
            k3 = self.slope(y + h * k2 / 2)
            k4 = self.slope(y + h * k3)
            states.append(y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
        return torch.stack(states)


@program
def differential_equation(wrap):
    model = Dynamics()
    compiled = wrap(model)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    times = torch.linspace(0, 1, 5)
    for _ in range(STEPS):
        start = torch.randn(4, 2)
        want = start * torch.exp(-times).view(-1, 1, 1)
        loss = F.mse_loss(compiled(start, times), want)
        update(optimizer, loss)
        yield loss
    return model


@program
def physics_by_second_derivatives(wrap):
    """A network that solves an equation: its second derivative is in the loss."""
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    u_of = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x = torch.rand(16, 1, requires_grad=True)
        u = u_of(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        loss = (ddu + u).square().mean() + (u_of(torch.zeros(1, 1)) - 1).square().sum()
        update(optimizer, loss)
        yield loss
    return model


class Waves(nn.Module):
    """A Fourier neural operator: complex weights for the lowest frequencies."""

    def __init__(self, width: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.skip, self.out = (
            nn.Linear(1, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x.unsqueeze(-1))
        waves = torch.fft.rfft(h, dim=1)
        low = torch.einsum("bmi,iom->bmo", waves[:, : self.modes], self.weight)
        full = torch.zeros_like(waves)
        full[:, : self.modes] = low
        h = F.gelu(torch.fft.irfft(full, x.shape[1], dim=1) + self.skip(h))
        return self.out(h).squeeze(-1)


@program
def fourier_operator(wrap):
    model = Waves()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        x = torch.randn(3, 16)
        loss = F.mse_loss(compiled(x), x.cumsum(-1) / 16)
        update(optimizer, loss)
        yield loss
    return model


class Towers(nn.Module):
    """Tables with sparse gradients below a dense network."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(20, 6, sparse=True) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.users(users), self.items(items)], -1)).squeeze(-1)


@program
def sparse_tables_below_a_dense_network(wrap):
    model = Towers()
    compiled = wrap(model)
    tables = [*model.users.parameters(), *model.items.parameters()]
    optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.Adam(model.top.parameters(), 1e-3)]
    for _ in range(STEPS):
        logits = compiled(torch.randint(20, (6,)), torch.randint(20, (6,)))
        loss = F.binary_cross_entropy_with_logits(logits, torch.randint(2, (6,)).float())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield loss
    for table in tables:
        table.grad = table.grad.to_dense()
    return model


class Transport(nn.Module):
    """Sinkhorn's iterations in a loop, between what two networks make."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cost = torch.cdist(self.left(x), self.right(y)).square()
        f, g = x.new_zeros(x.shape[0]), y.new_zeros(y.shape[0])
        for _ in range(5):
            f = -torch.logsumexp(g - cost, 1)
            g = -torch.logsumexp(f.unsqueeze(1) - cost, 0)
        plan = (f.unsqueeze(1) + g - cost).exp()
        return (plan * cost).sum() / plan.sum()


@program
def transport_between_sets(wrap):
    model = Transport()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = compiled(torch.randn(5 + step % 3, 4), torch.randn(6, 5))
        update(optimizer, loss)
        yield loss
    return model
