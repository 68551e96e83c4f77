# Loss scales of torch.amp.GradScaler: what overflows in the engine, and what is found of it.
from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from roads import ROADS
from torch import nn

import torch_ort
from torch_ort.optim import AdamW, FusedAdam

pytestmark = [pytest.mark.ort_only, pytest.mark.compile_only("takes both roads by itself")]

STEPS = 12
INFINITE = (3, 8)  # steps whose rows hold an infinity
DTYPES = [torch.float16, torch.bfloat16]
# By norm, of parameters after all steps: both sides round at the same places, but for sums and
# what regions keep in float32.
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "torch's AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-3),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=1e-3),
}


class Network(nn.Module):
    """What is wide enough for products of the engine, with a norm and attention-like softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 64), nn.LayerNorm(64)
        self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.gelu(self.first(x)))
        return self.last(hidden + torch.softmax(self.second(hidden), -1))


@dataclass
class Training:
    """What a training run gave, step by step."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


def train(
    call, model: nn.Module, optimizer_name: str, context, *, init_scale: float, accumulated: int = 1
) -> Training:
    """Train with a scaler whose scale grows after each three good steps and halves at a bad one."""
    torch.manual_seed(1)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    training = Training()
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulated):
            x, y = torch.randn(32, 16), torch.randint(8, (32,))
            if step in INFINITE:
                x[2, 3] = torch.inf
            with context():
                loss = F.cross_entropy(call(x), y) / accumulated
            scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        training.losses.append(loss.item())
        training.scales.append(scaler.get_scale())
        after = list(model.parameters())
        training.skipped.append(all(map(torch.equal, before, after)))
    training.parameters = [p.detach().clone() for p in model.parameters()]
    return training


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    squares = sum((a.double() - b.double()).pow(2).sum() for a, b in zip(ours, theirs, strict=True))
    return float((squares / sum(b.double().pow(2).sum() for b in theirs)).sqrt())


def assert_same(ours: Training, eager: Training, tolerance: float) -> None:
    assert ours.scales == eager.scales
    assert ours.skipped == eager.skipped
    torch.testing.assert_close(
        ours.losses, eager.losses, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    assert distance(ours.parameters, eager.parameters) < tolerance


def autocast(dtype: torch.dtype):
    return lambda: torch.autocast("cpu", dtype=dtype)


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Network()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("road", ROADS)
def test_under_autocast(road, dtype, optimizer, pair):
    model, other = pair
    eager = train(model, model, optimizer, autocast(dtype), init_scale=2.0**8)
    ours = train(ROADS[road](other), other, optimizer, autocast(dtype), init_scale=2.0**8)
    assert [step for step, skipped in enumerate(eager.skipped) if skipped] == [*INFINITE]
    assert eager.scales[2] == 2.0**9 == 2 * eager.scales[3]
    assert_same(ours, eager, CLOSE[dtype])
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["backward_runs"] == STEPS


@pytest.mark.parametrize("road", ROADS)
def test_a_scale_that_float16_cannot_hold(road, pair):
    """Gradients overflow where eager's do, until the scale has come down to what float16 holds."""
    model, other = pair
    context = autocast(torch.float16)
    eager = train(model, model, "SGD", context, init_scale=2.0**26)
    ours = train(ROADS[road](other), other, "SGD", context, init_scale=2.0**26)
    assert eager.skipped[:4] == [True] * 4
    assert not all(eager.skipped)
    assert_same(ours, eager, CLOSE[torch.float16])


@pytest.mark.parametrize("road", ROADS)
def test_accumulated_gradients(road, pair):
    model, other = pair
    context = autocast(torch.float16)
    eager = train(model, model, "FusedAdam", context, init_scale=2.0**8, accumulated=2)
    ours = train(ROADS[road](other), other, "FusedAdam", context, init_scale=2.0**8, accumulated=2)
    assert_same(ours, eager, CLOSE[torch.float16])


@pytest.mark.parametrize("road", ROADS)
def test_bfloat16_parameters(road, pair):
    """Of parameters in bfloat16 themselves, without autocast; FusedAdam's moments are float32."""
    model, other = (each.bfloat16() for each in pair)

    def to_bfloat16(call):
        return lambda x: call(x.bfloat16()).float()

    settings = {"context": contextlib.nullcontext, "init_scale": 2.0**8}
    eager = train(to_bfloat16(model), model, "FusedAdam", **settings)
    ours = train(to_bfloat16(ROADS[road](other)), other, "FusedAdam", **settings)
    assert [step for step, skipped in enumerate(eager.skipped) if skipped] == [*INFINITE]
    assert_same(ours, eager, CLOSE[torch.bfloat16])


@pytest.mark.parametrize("road", ROADS)
def test_float16_parameters(road, pair):
    """A scaler unscales no float16 gradients: FusedAdam takes its scale, as eager's fused does."""
    model, other = (each.half() for each in pair)

    def to_half(call):
        return lambda x: call(x.half()).float()

    settings = {"context": contextlib.nullcontext, "init_scale": 2.0**8}
    eager = train(to_half(model), model, "FusedAdam", **settings)
    ours = train(to_half(ROADS[road](other)), other, "FusedAdam", **settings)
    assert [step for step, skipped in enumerate(eager.skipped) if skipped] == [*INFINITE]
    assert_same(ours, eager, CLOSE[torch.float16])
