"""How people write modules: hooks, objects, Functions, buffers, shared parts, odd results."""

from __future__ import annotations

from argparse import Namespace
from typing import NamedTuple

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F


def steps_of(compiled, model, optimizer, make_loss):
    for step in range(STEPS):
        loss = make_loss(compiled, step)
        update(optimizer, loss)
        yield loss
    return model


def plain_loss(compiled, step):
    return F.cross_entropy(compiled(torch.randn(6, 8)), torch.randint(3, (6,)))


@program
def hooks_that_keep_activations(wrap):
    """Forward hooks keep features for a loss of their own, and count what they have seen."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    kept, counts = {}, torch.zeros(2)
    model[1].register_forward_hook(lambda module, args, result: kept.update(features=result))
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        logits = compiled(torch.randn(6, 8))
        features = kept["features"]
        loss = F.cross_entropy(logits, torch.randint(3, (6,))) + 0.1 * features.abs().mean()
        counts[0] += (features.detach() > 0).sum()
        update(optimizer, loss)
        yield loss
    return model, counts


def halve_the_gradient(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


@program
def hooks_on_gradients(wrap):
    """Gradients of parameters are clipped one by one, and those of a layer's result scaled."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    norms = torch.zeros(STEPS)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    for parameter in model[2].parameters():
        parameter.register_post_accumulate_grad_hook(halve_the_gradient)
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(6, 8, requires_grad=True)
        x.register_hook(lambda gradient, step=step: norms[step].copy_(gradient.norm()) and None)
        loss = F.cross_entropy(compiled(x), torch.randint(3, (6,)))
        update(optimizer, loss)
        yield loss
    return model, norms


class Reverses(torch.autograd.Function):
    """Reverses gradients, times a number."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = (
            nn.Linear(8, 16),
            nn.Linear(16, 3),
            nn.Linear(16, 2),
        )

    def forward(self, x: torch.Tensor, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.features(x).relu()
        return self.label(h), self.domain(Reverses.apply(h, strength))


@program
def domain_adaptation_by_reversed_gradients(wrap):
    model = Domains()
    compiled = wrap(model)

    def loss_of(compiled, step):
        label, domain = compiled(torch.randn(6, 8), step / STEPS)
        loss = F.cross_entropy(label, torch.randint(3, (6,)))
        return loss + F.cross_entropy(domain, torch.randint(2, (6,)))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, loss_of))


class ChunkedLoss(torch.autograd.Function):
    """Computes a loss and its gradient together, in pieces; its second result has no gradient."""

    @staticmethod
    def forward(ctx, x, weight, target):
        losses, right = [], []
        for part, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
            logits = part @ weight.T
            losses.append(F.cross_entropy(logits, wanted, reduction="none"))
            right.append(logits.argmax(-1) == wanted)
        ctx.save_for_backward(x, weight, target)
        ctx.mark_non_differentiable(result := torch.cat(right).float().mean())
        return torch.cat(losses).mean(), result

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight, target = ctx.saved_tensors
        p = (x @ weight.T).softmax(-1)
        p[torch.arange(len(target)), target] -= 1
        p = p * (gradient / len(target))
        return p @ weight, p.T @ x, None


class WithChunkedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ChunkedLoss.apply(self.body(x).tanh(), self.head.weight, target)


@program(quick=True)
def loss_as_a_function_of_its_own(wrap):
    model = WithChunkedLoss()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss, right = compiled(torch.randn(6, 8), torch.randint(3, (6,)))
        update(optimizer, loss)
        yield loss, right
    return model


class Options(nn.Module):
    """Takes all of its arguments from one Namespace, and returns a named tuple."""

    class Result(NamedTuple):
        loss: torch.Tensor
        logits: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, batch: Namespace) -> Result:
        logits = self.layer(batch.x) * batch.scale
        if batch.mask is not None:
            logits = logits.masked_fill(~batch.mask, -1e4)
        return self.Result(F.cross_entropy(logits, batch.y), logits)


@program(quick=True)
def arguments_in_a_namespace(wrap):
    model = Options()
    compiled = wrap(model)

    def loss_of(compiled, step):
        mask = torch.rand(6, 3) < 0.8 if step % 2 else None
        x, y = torch.randn(6, 8), torch.randint(3, (6,))
        return compiled(Namespace(x=x, y=y, mask=mask, scale=2.0)).loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, loss_of))


class RunningNorm(nn.Module):
    """Keeps statistics of its input by Welford's method, in buffers that it replaces."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                total = self.count + x.shape[0]
                change = x.mean(0) - self.mean
                both = self.variance * self.count + x.var(0, correction=0) * x.shape[0]
                both = both + change.square() * self.count * x.shape[0] / total
                self.mean = self.mean + change * x.shape[0] / total
                self.variance = both / total
                self.count = total
        return (x - self.mean) / (self.variance + 1e-5).sqrt()


@program
def buffers_that_forward_replaces(wrap):
    model = nn.Sequential(RunningNorm(8), nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 3))
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, plain_loss))


class Memory(nn.Module):
    """Carries a state from call to call in a buffer, which is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 6), nn.Linear(6, 3)
        self.register_buffer("state", torch.zeros(2, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x, self.state.clone().unbind())
        self.state[0] = h.detach()
        self.state[1] = c.detach()
        return self.head(h)


@program
def state_carried_in_a_buffer(wrap):
    model = Memory()
    compiled = wrap(model)

    def loss_of(compiled, step):
        return F.cross_entropy(compiled(torch.randn(4, 8)), torch.randint(3, (4,)))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, loss_of))


@program
def weights_by_parametrizations(wrap):
    """Orthogonal and normalized weights, and old-style weight norm."""
    model = nn.Sequential(
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
        nn.ELU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.Softsign(),
        nn.Linear(16, 3),
    )  # fmt: skip
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, plain_loss))


class Deep(nn.Module):
    """Layers that are left out at random by Python's random numbers (LayerDrop)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()).item() < 0.3:
                continue
            x = x + layer(x).tanh()
        return self.head(x)


@program
def layers_left_out_by_item(wrap):
    model = Deep()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, plain_loss))


class Experts(nn.Module):
    """Stacked weights of several members, called by torch.func.vmap."""

    def __init__(self, members: int = 3) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(members, 3, 8) * 0.3)
        self.biases = nn.Parameter(torch.zeros(members, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = torch.func.vmap(F.linear, in_dims=(None, 0, 0))(x, self.weights, self.biases)
        return results.log_softmax(-1).logsumexp(0)


@program
def ensemble_by_vmap(wrap):
    model = Experts()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, plain_loss))


class Shared(nn.Module):
    """One layer many times, until the change is small enough or a count is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.cell = nn.Linear(8, 6), nn.Linear(6, 6)
        self.halt, self.head = nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.inputs(x)
        remaining = torch.ones(x.shape[0], 1)
        mixed, ponder = torch.zeros_like(h), torch.zeros(x.shape[0], 1)
        for i in range(4):
            h = torch.tanh(self.cell(h) + h)
            p = self.halt(h).sigmoid() if i < 3 else torch.ones_like(remaining)
            mixed, ponder = mixed + remaining * p * h, ponder + remaining
            remaining = remaining * (1 - p)
        return self.head(mixed), ponder.mean()


@program
def pondering_over_one_layer(wrap):
    model = Shared()
    compiled = wrap(model)

    def loss_of(compiled, step):
        logits, ponder = compiled(torch.randn(6, 8))
        return F.cross_entropy(logits, torch.randint(3, (6,))) + 0.01 * ponder

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, loss_of))


@program
def double_precision_and_complex_weights(wrap):
    """A linear layer of complex numbers, and a loss in double precision."""
    model = ComplexLinear().double()
    compiled = wrap(model)

    def loss_of(compiled, step):
        signal = torch.randn(5, 4, dtype=torch.cdouble)
        return (compiled(signal) - signal.abs().sum(-1)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return (yield from steps_of(compiled, model, optimizer, loss_of))


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(torch.randn(6, 4) * 0.3) for _ in range(2))
        self.out = nn.Parameter(torch.randn(6) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ torch.complex(self.real, self.imaginary).T
        y = torch.polar(torch.tanh(y.abs()), y.angle())
        return (y * y.conj()).real @ self.out


class Levels(nn.Module):
    """Gives a result at each depth, and more of them where it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, wants_features: bool = False) -> dict:
        results, features = [], []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x).relu()
            features.append(x)
            results.append(head(x))
        return {"logits": results, "features": features if wants_features else None}


@program
def losses_that_are_called_apart(wrap):
    """Three losses of one forward call have a backward each, which share a part of the graph."""
    model = Levels()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        result = compiled(torch.randn(6, 8), wants_features=step % 2 == 0)
        target = torch.randint(3, (6,))
        losses = [F.cross_entropy(logits, target) for logits in result["logits"]]
        optimizer.zero_grad()
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i < 2)
        optimizer.step()
        yield losses
    return model


@program
def unlabelled_data_with_pseudo_labels(wrap):
    """The model labels in evaluation, under inference mode, what it then trains on."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y, others = torch.randn(4, 8), torch.randint(3, (4,)), torch.randn(6, 8)
        model.eval()
        with torch.inference_mode():
            sure, labels = compiled(others).softmax(-1).max(-1)
        model.train()
        is_sure = (sure > 0.4).clone()
        loss = F.cross_entropy(compiled(x), y)
        if is_sure.any():
            loss = loss + 0.5 * F.cross_entropy(compiled(others[is_sure]), labels.clone()[is_sure])
        update(optimizer, loss)
        yield loss
    return model


@program
def saved_tensors_on_the_cpu(wrap):
    """Hooks on saved tensors, which move them away until backward."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    compiled = wrap(model)

    def loss_of(compiled, step):
        with torch.autograd.graph.save_on_cpu():
            return plain_loss(compiled, step)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (yield from steps_of(compiled, model, optimizer, loss_of))
