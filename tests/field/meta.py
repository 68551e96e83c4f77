"""Meta-learning: gradients of gradients, weights as inputs, networks that make weights."""

from __future__ import annotations

import copy

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


def sines() -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.rand(()) * 3
    x = torch.rand(16, 1) * 4
    return x, torch.sin(x + phase)


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@program
def reptile(wrap):
    """Trains a copy for a task, and moves the model towards it."""
    model, learner = Curve(), Curve()
    compiled = wrap(learner)
    for _ in range(STEPS):
        learner.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.05)
        x, y = sines()
        for _ in range(3):
            loss = F.mse_loss(compiled(x), y)
            update(optimizer, loss)
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), learner.parameters(), strict=True):
                ours.lerp_(theirs, 0.3)
        yield loss
    return model


class Adapts(nn.Module):
    """One inner step of gradient descent, inside of forward (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.curve = Curve()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = dict(self.curve.named_parameters())
        loss = F.mse_loss(functional_call(self.curve, weights, (x[:8],)), y[:8])
        slopes = torch.autograd.grad(loss, weights.values(), create_graph=True)
        moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(self.curve, moved, (x[8:],)), y[8:])


@program
def inner_gradients_inside_of_forward(wrap):
    model = Adapts()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = compiled(*sines())
        update(optimizer, loss)
        yield loss
    return model


@program
def first_order_maml(wrap):
    """The gradient at the adapted copy is that of the model."""
    model, learner = Curve(), Curve()
    compiled = wrap(learner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        learner.load_state_dict(model.state_dict())
        x, y = sines()
        slopes = torch.autograd.grad(F.mse_loss(compiled(x[:8]), y[:8]), list(learner.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(learner.parameters(), slopes, strict=True):
                parameter.sub_(slope, alpha=0.1)
        loss = F.mse_loss(compiled(x[8:]), y[8:])
        learner.zero_grad()
        loss.backward()
        for ours, theirs in zip(model.parameters(), learner.parameters(), strict=True):
            ours.grad = theirs.grad.clone()
        optimizer.step()
        yield loss
    return model


class MakesWeights(nn.Module):
    """A network whose result is the weights of another (a hypernetwork)."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.make = nn.Embedding(3, 4), nn.Linear(4, 3 * 5 + 5)

    def forward(self, task: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.make(self.task(task)).split([15, 5], -1)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.unflatten(-1, (3, 5))).tanh()


@program
def network_that_makes_weights(wrap):
    model = MakesWeights()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = (compiled(torch.randint(3, (4,)), torch.randn(4, 6, 3)) - 0.5).square().mean()
        update(optimizer, loss)
        yield loss
    return model


class Prototypes(nn.Module):
    """Few examples of each class: queries are compared with the means of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(
        self, support: torch.Tensor, labels: torch.Tensor, query: torch.Tensor
    ) -> torch.Tensor:
        hot = F.one_hot(labels, 3).float()
        means = hot.T @ self.embed(support) / hot.sum(0).unsqueeze(-1)
        return -self.scale * torch.cdist(self.embed(query), means).square()


@program
def prototypes_of_few_examples(wrap):
    model = Prototypes()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    labels = torch.arange(3).repeat(2)
    for _ in range(STEPS):
        loss = F.cross_entropy(compiled(torch.randn(6, 6), labels, torch.randn(6, 6)), labels)
        update(optimizer, loss)
        yield loss
    return model


@program
def continual_learning_by_importance(wrap):
    """Squared gradients of an old task hold weights in place (EWC)."""
    model = Curve()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    importance, old = None, None
    for step in range(STEPS):
        x, y = sines()
        loss = F.mse_loss(compiled(x), y)
        if importance is not None:
            for p, before, weight in zip(model.parameters(), old, importance, strict=True):
                loss = loss + (weight * (p - before).square()).sum()
        update(optimizer, loss)
        if step == 4:
            optimizer.zero_grad()
            F.mse_loss(compiled(x), y).backward()
            importance = [p.grad.square() for p in model.parameters()]
            old = copy.deepcopy([p.detach() for p in model.parameters()])
        yield loss
    return model
