"""Gradients that a function computes in the middle of it, and that its loss depends on.

| what                                                  | has to give                              |
| ----------------------------------------------------- | ---------------------------------------- |
| physics, forces, penalties, meta-learning, sampling   | eager's results and gradients, no graph  |
|                                                       | in eager PyTorch, for several sizes      |
| batches of gradients, unused inputs, of convolutions  | the same                                 |
| `requires_grad_()` of an argument                     | is set after the call, in each call      |
| the same of an argument that is not dense             | eager PyTorch                            |
| `backward()` in forward                               | eager PyTorch, which fills `.grad`       |
| PyTorch's setting, and other backends                 | stay as they are                         |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import torch_ort
from tests.roads import ROADS

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot run a graph.*")


def network(inputs: int = 2, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, outputs)
    )


class Physics(nn.Module):
    """The residual of Burgers' equation, with first and second derivatives of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.u = network()

    def forward(self, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_(True)
        u = self.u(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        by_x, by_t = slope.unbind(-1)
        (second,) = torch.autograd.grad(by_x.sum(), points, create_graph=True)
        return (by_t + u[:, 0] * by_x - 0.01 * second[:, 0]).square().mean()


class SlopeOfArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u = network()

    def forward(self, points: Tensor) -> Tensor:
        u = self.u(points)
        (slope,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
        return slope.square().mean() + u.mean()


class Forces(nn.Module):
    """An energy and its negative gradient by the positions, which forward makes leaves of."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = network(3)

    def forward(self, positions: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
        positions.requires_grad_(True)
        apart = (positions[:, None] - positions[None]).square().sum(-1) + 1
        energy = self.energy(positions).sum() + apart.reciprocal().sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return energy, F.mse_loss(-slope, want)


class Penalty(nn.Module):
    """The loss of a critic whose slope is held at 1 between real and made samples."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = network()

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * penalty


class PenaltyOfImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(8 * 16, 1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        images = images.detach().requires_grad_()
        out = self.critic(images)
        (slope,) = torch.autograd.grad(out.sum(), images, create_graph=True)
        return F.softplus(-out).mean() + slope.square().sum((1, 2, 3)).mean()


class Meta(nn.Module):
    """Two steps of gradient descent, and the loss after them."""

    def __init__(self, is_first_order: bool) -> None:
        super().__init__()
        self.model = network()
        self.is_first_order = is_first_order

    def forward(self, x: Tensor, y: Tensor, later_x: Tensor, later_y: Tensor) -> Tensor:
        weights = dict(self.model.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(self.model, weights, (x,)), y)
            slopes = torch.autograd.grad(
                loss, list(weights.values()), create_graph=not self.is_first_order
            )
            named = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - 0.1 * slope for (name, weight), slope in named}
        return F.mse_loss(functional_call(self.model, weights, (later_x,)), later_y)


class HessianTimesVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, x: Tensor, vector: Tensor) -> tuple[Tensor, ...]:
        weights = list(self.model.parameters())
        slopes = torch.autograd.grad(self.model(x).square().sum(), weights, create_graph=True)
        along = sum((slope * vector.sum()).sum() for slope in slopes)
        return torch.autograd.grad(along, weights)


class Kept(nn.Module):
    """A result that is differentiated inside, and again by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, x: Tensor) -> Tensor:
        y = self.model(x)
        slopes = torch.autograd.grad(y.sum(), list(self.model.parameters()), retain_graph=True)
        return y * sum(slope.square().sum() for slope in slopes)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        other = torch.ones_like(x, requires_grad=True)
        slope, none = torch.autograd.grad(
            self.model(x).sum(), [x, other], allow_unused=True, create_graph=True
        )
        _, zeros = torch.autograd.grad(
            self.model(x).sum(), [x, other], allow_unused=True, materialize_grads=True
        )
        return slope.square().sum() + zeros.sum() + (0 if none is None else 1)


class Rows(nn.Module):
    """A matrix of derivatives, whose rows are a batch of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network(outputs=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.model(x).sum(0)
        (rows,) = torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, create_graph=True)
        return rows.square().sum()


class FillsGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        self.model(x).sum().backward()
        return x.grad * 2


Batch = Callable[[int], Sequence[Tensor]]


def batch(*sizes: tuple[int, ...]) -> Batch:
    return lambda rows: [torch.randn(rows, *size) for size in sizes]


CASES: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "physics": (Physics, batch((2,))),
    "argument": (SlopeOfArgument, lambda rows: [torch.randn(rows, 2, requires_grad=True)]),
    "forces": (Forces, batch((3,), (3,))),
    "penalty": (Penalty, batch((2,), (2,))),
    "images": (PenaltyOfImages, batch((3, 8, 8))),
    "meta": (lambda: Meta(False), batch((2,), (1,), (2,), (1,))),
    "meta, first order": (lambda: Meta(True), batch((2,), (1,), (2,), (1,))),
    "hessian": (HessianTimesVector, batch((2,), (1,))),
    "kept": (Kept, batch((2,))),
    "unused": (Unused, batch((2,))),
}


def step(call: Callable[..., object], model: nn.Module, given: Sequence[Tensor]) -> list[Tensor]:
    """Give the results of a call, and the gradients of parameters and arguments."""
    model.zero_grad()
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
    results = call(*given)
    results = list(results) if isinstance(results, tuple) else [results]
    asking = [result for result in results if result.requires_grad]
    if asking:
        sum(result.square().sum() for result in asking).backward()
    gradients = [x.grad for x in (*model.parameters(), *given) if x.grad is not None]
    return [result.detach() for result in results] + [each.clone() for each in gradients]


def check(call: Callable[..., object], model: nn.Module, make: Batch) -> None:
    for rows in (4, 7, 4):
        given = make(rows)
        want, got = step(model, model, given), step(call, model, given)
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check_road(road: str, model: nn.Module, make: Batch) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    check(ROADS[road](model), model, make)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["frames_left_to_eager"] == 0
    assert counters["calls_left_to_eager"] == counters["captures_refused"] == 0
    assert counters["forward_runs"] > 0


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", CASES)
def test_against_eager(name: str, road: str) -> None:
    torch.manual_seed(0)
    make_model, make_batch = CASES[name]
    check_road(road, make_model(), make_batch)


@pytest.mark.hands_over("transforms of torch.func, by which PyTorch takes a batch of gradients")
@pytest.mark.parametrize("road", ROADS)
def test_batches_of_gradients(road: str) -> None:
    check_road(road, Rows(), batch((2,)))


@pytest.mark.parametrize("road", ROADS)
def test_arguments_become_leaves(road: str) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    model = Forces()
    call = ROADS[road](model)
    for rows in (4, 4, 6):
        positions, same = torch.randn(rows, 3), torch.randn(rows, 3)
        same.copy_(positions)
        want = torch.randn(rows, 3)
        for run, given in ((model, positions), (call, same)):
            energy, loss = run(given, want)
            (energy + loss).backward()
            assert given.requires_grad
        torch.testing.assert_close(same.grad, positions.grad)
        call(same, want)  # a leaf already
    assert torch_ort.counters()["fallbacks"] == 0


def test_arguments_are_leaves_no_more() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x.requires_grad_(False))

    call = torch_ort.ORTModule(Frozen())
    for _ in range(2):
        x = torch.randn(4, 2, requires_grad=True)
        call(x).sum().backward()
        assert not x.requires_grad
        assert x.grad is None


def test_arguments_that_are_not_dense_are_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ORT_STRICT", raising=False)
    model = Forces()
    call = torch_ort.ORTModule(model)
    positions, want = torch.randn(4, 6)[:, ::2], torch.randn(4, 3)
    _, loss = call(positions, want)
    loss.backward()
    assert positions.requires_grad
    assert positions.grad is not None
    assert torch_ort.counters()["calls_left_to_eager"] == 1


def test_backward_in_forward_is_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ORT_STRICT", raising=False)
    torch.manual_seed(0)
    model = FillsGrad()
    other = copy.deepcopy(model)
    call = torch_ort.ORTModule(other)
    x = torch.randn(4, 2)
    for _ in range(2):  # gradients add up
        torch.testing.assert_close(call(x), model(x))
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_backward_in_forward_is_named() -> None:
    with pytest.raises(Exception, match=r"forward calls backward\(\), which adds to the gradients"):
        torch_ort.ORTModule(FillsGrad())(torch.randn(4, 2))


def test_the_setting_stays() -> None:
    torch.compiler.reset()
    assert not torch._dynamo.config.trace_autograd_ops
    model = Physics()
    torch.compile(model, backend="ort")(torch.randn(4, 2))
    assert not torch._dynamo.config.trace_autograd_ops
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch.compile(SlopeOfArgument(), backend=backend)(torch.randn(4, 2, requires_grad=True))
    assert len(graphs) > 1  # broken at torch.autograd.grad
