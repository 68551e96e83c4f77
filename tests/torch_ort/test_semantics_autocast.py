# Mixed precision: the casts belong to the graph, whatever is active when it runs.
from __future__ import annotations

import contextlib
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_ort
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.both_roads

# Both sides round to bfloat16 at the same places; sums may still run in another order.
CLOSE = {"rtol": 1.6e-2, "atol": 8e-3}


class Network(nn.Module):
    """Layers that autocast lowers, keeps and widens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(F.gelu(self.first(x)))
        return self.second(hidden), torch.softmax(self.second(hidden), -1)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 16, requires_grad=True)


def autocast(device: str, **settings: object) -> functools.partial:
    return functools.partial(torch.autocast, device, dtype=torch.bfloat16, **settings)


def test_forward_inside_backward_outside(compare_training, device):
    want, _ = compare_training(Network, rows, forward_context=autocast(device), **CLOSE)
    assert want.records[0]["output 0"].dtype == torch.bfloat16
    assert want.records[0]["gradient of first.weight"].dtype == torch.float32


class Normed(nn.Module):
    """Gives two results; the statistics of its norm are float32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.linear(x))
        return F.cross_entropy(hidden, x.argmax(1) % 8), hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_batch_norm_of_which_one_result_is_used(compiled, device, dtype):
    model = Normed().to(device)
    x = rows(0).to(device)
    results = []
    for run in (model, compiled(model)):
        with torch.autocast(device, dtype):
            loss, _ = run(x)
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(results[1], results[0], **CLOSE)


def test_forward_and_backward_inside(compare_training, device):
    compare_training(
        Network, rows, forward_context=autocast(device), backward_context=autocast(device), **CLOSE
    )


@pytest.mark.ort_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_outside_backward_inside(both, dtype, device, monkeypatch):
    """Eager PyTorch rounds the products of backward here, for which no graph is recorded.

    One of the dtypes is not what `torch.autocast(device)` casts to by default.
    """
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    torch.manual_seed(0)
    model = Network().to(device)
    x = rows(0).to(device).detach().requires_grad_()
    gradients = []
    for run in both(model):
        loss = run(x)[1].square().sum()
        is_ours = run is not model
        with (
            torch.autocast(device, dtype),
            pytest.warns(FallbackWarning, match=str(dtype)) if is_ours else nullcontext(),
        ):
            gradients.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_inside_the_module(compare_training, device):
    class Inside(Network):
        def forward(self, x):
            with torch.autocast(device, dtype=torch.bfloat16):
                hidden = self.first(x)
            return self.second(F.gelu(hidden.float())), hidden

    compare_training(Inside, rows, **CLOSE)


def test_switched_off_inside_the_module(compare_training, device):
    class Exact(Network):
        def forward(self, x):
            hidden = self.first(x)
            with torch.autocast(device, enabled=False):
                return self.second(hidden.float()), hidden

    compare_training(Exact, rows, forward_context=autocast(device), **CLOSE)


def test_switched_between_steps(compare_training, device, graphs_captured):
    calls = iter([True, False, True, False] * 2)

    def alternate():
        return torch.autocast(device, dtype=torch.bfloat16, enabled=next(calls))

    compare_training(Network, rows, forward_context=alternate, steps=4, **CLOSE)
    assert graphs_captured() == 2


def test_with_batch_norm_and_convolution(compare_training, device):
    def model():
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)
        )

    compare_training(
        model, lambda step: torch.randn(4, 3, 8, 8), forward_context=autocast(device), **CLOSE
    )


def test_weight_used_twice(compare_training, device):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    compare_training(Shared, rows, forward_context=autocast(device), **CLOSE)


def test_dropout_keeps_the_stream_of_eager(compare_training, device):
    compare_training(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)),
        rows,
        forward_context=autocast(device),
        **CLOSE,
    )


def test_loss_inside(compare_training, device):
    class WithLoss(Network):
        def forward(self, x, labels):
            return F.cross_entropy(super().forward(x)[0], labels)

    want, _ = compare_training(
        WithLoss,
        lambda step: (torch.randn(6, 16), torch.randint(0, 8, (6,))),
        forward_context=autocast(device),
        loss=lambda value: value,
        **CLOSE,
    )
    assert want.records[0]["output 0"].dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(compare_training, device, mode):
    @contextlib.contextmanager
    def evaluation():
        with mode(), torch.autocast(device, dtype=torch.bfloat16):
            yield

    compare_training(Network, rows, forward_context=evaluation, **CLOSE)


def test_bfloat16_module_without_autocast(compare_training):
    class Half(Network):
        def __init__(self):
            super().__init__()
            self.bfloat16()

    compare_training(Half, lambda step: torch.randn(6, 16, dtype=torch.bfloat16), **CLOSE)


def test_float16_on_the_cpu(compare_training):
    compare_training(
        Network,
        rows,
        forward_context=lambda: torch.autocast("cpu", dtype=torch.float16),
        rtol=2e-3,
        atol=1e-3,
    )


@pytest.mark.cuda
def test_gradient_scaler(compiled, assert_engine_ran):
    losses = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = Network().cuda()
        call = compiled(model) if compile_it else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = call(torch.randn(6, 16, device="cuda"))[0].float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert_engine_ran(backward=True)


MIXED = {
    "add": lambda a, b: a + b,
    "add, alpha": lambda a, b: torch.add(a, b, alpha=3),
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


@pytest.mark.ort_only
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32),
        (torch.int32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(5, 7), (7,), (5, 1), ()], ids=str)
def test_operands_of_two_dtypes(compiled, device, name, first, second, shape):
    """As wide as the wider one: a residual stream under autocast, and what is added to it."""

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return MIXED[name](a, b).exp()

    a = (
        torch.linspace(-1, 1, 35, device=device)
        .view(5, 7)
        .mul(4 if not first.is_floating_point else 1)
    )
    b = torch.linspace(0.5, 1, 35, device=device)[: torch.Size(shape).numel()].view(shape)
    results = []
    for call in (function, compiled(function)):
        leaves = [t.to(dtype) for t, dtype in ((a, first), (b, second))]
        leaves = [t.requires_grad_(t.is_floating_point()) for t in leaves]
        result = call(*leaves)
        weights = torch.linspace(-1, 1, 35, device=device).view(5, 7)
        (result.double() * weights).sum().backward()
        results.append([result, *(t.grad for t in leaves if t.grad is not None)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **(CLOSE if got.dtype.itemsize == 2 else {}))


@pytest.mark.ort_only
@pytest.mark.compile_only("reads parameters of a closure")
def test_a_residual_stream_runs_in_regions(compiled, device):
    """What lies between two products: one region, with the sum of two dtypes inside of it."""
    inner = nn.Linear(16, 16).to(device)
    call = compiled(lambda x: (x + inner(F.gelu(x))).tanh())
    x = rows(0).to(device)
    for _ in range(2):
        before = torch_ort.counters()["steps_region"]
        with torch.autocast(device, torch.bfloat16):
            call(x.detach())
        # gelu(x); and the sum with tanh
        assert torch_ort.counters()["steps_region"] - before == 2


@pytest.mark.ort_only
@pytest.mark.parametrize("dims", [None, 0, (0, 1)], ids=str)
def test_sums_in_a_wider_dtype(compiled, device, dims):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dims, dtype=torch.float32) if dims is not None else x.sum(dtype=torch.float32)

    x = torch.linspace(0, 1, 12_000, device=device).view(3000, 4).to(torch.bfloat16)
    got = compiled(function)(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double().sum(dims), rtol=1e-5, atol=0)
