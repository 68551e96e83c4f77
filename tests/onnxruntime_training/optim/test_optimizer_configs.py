"""AdamConfig and SGDConfig, and schedules of learning rates against other programs' formulas."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torch_ort.optim import (
    SGD,
    AdamConfig,
    FusedAdam,
    LambConfig,
    OptimizerConfig,
    SGDConfig,
    lr_scheduler,
)


def test_defaults_are_those_of_onnx_runtime_training():
    assert AdamConfig().defaults == {
        "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "epsilon": 1e-8,
        "max_norm_clip": 1.0, "do_bias_correction": True,
        "weight_decay_mode": AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE,
    }  # fmt: skip
    assert SGDConfig().defaults == {"lr": 0.001}
    names = [config().name for config in (SGDConfig, AdamConfig, LambConfig)]
    assert names == ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"]
    assert AdamConfig(beta=0.5).beta == 0.5


@pytest.mark.parametrize("mode", AdamConfig.DecayMode)
def test_adam_decays_before_or_after_the_update(mode):
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(4, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = AdamConfig(
        [{"params": ["bias"], "lambda_coef": 0.0}], lr=0.1, lambda_coef=0.5, max_norm_clip=1e9,
        weight_decay_mode=mode,
    )  # fmt: skip
    optimizer = config.optimizer(ours.named_parameters())
    is_before = mode is AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1, eps=1e-8, weight_decay=0.0)
    for _ in range(5):
        x = torch.randn(8, 4)
        for model, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            if is_before:
                theirs.weight.mul_(1 - 0.1 * 0.5)
            reference.step()
            if not is_before:
                theirs.weight.mul_(1 - 0.1 * 0.5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-6)


def test_the_clipping_norm_is_kept_by_the_optimizer():
    model = nn.Linear(4, 3)
    optimizer = AdamConfig(max_norm_clip=0.25).optimizer(model.named_parameters())
    optimizer = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(optimizer, FusedAdam)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.full_like(param, 100.0)
    optimizer.step()
    norm = 100.0 * math.sqrt(param.numel())
    assert optimizer.grad_norm == pytest.approx(norm)
    moment = optimizer.state[param]["exp_avg"]
    torch.testing.assert_close(moment, torch.full_like(moment, 0.1 * 0.25 * 100.0 / norm))


def test_sgd():
    optimizer = SGDConfig(lr=0.5).optimizer(nn.Linear(2, 2).named_parameters())
    assert isinstance(optimizer, SGD)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGDConfig([{"params": ["w"]}]), "SGDConfig: params: got 1 groups, want none"),
        (lambda: AdamConfig([{"params": "w"}]), "AdamConfig: params: got 'w', want a list of na"),
        (lambda: AdamConfig([{"params": [], "lr": 1}]), "AdamConfig: group: got 'lr', want some"),
        (lambda: AdamConfig([{"params": [], "ratio_min": 1}]), "group: got 'ratio_min', want"),
        (lambda: AdamConfig(weight_decay_mode=2), "2 is not a valid"),
        (lambda: OptimizerConfig("Adam", [], {"lr": 1}), "name: got 'Adam', want one of SGDOpti"),
        (lambda: OptimizerConfig("SGDOptimizer", [], {}), "defaults: got no 'lr', want a learn"),
    ],
)
def test_wrong_configs(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def rates(schedule, steps, lr=0.1):
    config = SGDConfig(lr=lr)
    infos = (
        SimpleNamespace(optimizer_config=config, optimization_step=step) for step in range(steps)
    )
    return [schedule.step(info) for info in infos]


SCHEDULES = {
    "constant": (lr_scheduler.ConstantWarmupLRScheduler, {}, "get_constant_schedule_with_warmup"),
    "linear": (lr_scheduler.LinearWarmupLRScheduler, {}, "get_linear_schedule_with_warmup"),
    "cosine": (lr_scheduler.CosineWarmupLRScheduler, {}, "get_cosine_schedule_with_warmup"),
    "two waves": (
        lr_scheduler.CosineWarmupLRScheduler, {"cycles": 2.0}, "get_cosine_schedule_with_warmup",
    ),
    "poly": (
        lr_scheduler.PolyWarmupLRScheduler, {}, "get_polynomial_decay_schedule_with_warmup",
    ),
    "square": (
        lr_scheduler.PolyWarmupLRScheduler, {"power": 2.0, "lr_end": 0.01},
        "get_polynomial_decay_schedule_with_warmup",
    ),
}  # fmt: skip
THEIR_NAMES = {"cycles": "num_cycles"}


@pytest.mark.hf
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    kind, settings, theirs = SCHEDULES[name]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    arguments = {THEIR_NAMES.get(key, key): value for key, value in settings.items()}
    if name != "constant":
        arguments["num_training_steps"] = 20
    reference = getattr(transformers, theirs)(optimizer, num_warmup_steps=5, **arguments)
    want = []
    for _ in range(24):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert rates(kind(20, warmup=0.25, **settings), 24) == pytest.approx(want)


@pytest.mark.parametrize(
    ("schedule", "torchs"),
    [
        (lr_scheduler.LinearWarmupLRScheduler(10, warmup=0.0),
         lambda it: torch.optim.lr_scheduler.LinearLR(it, 1.0, 0.0, 10)),
        (lr_scheduler.PolyWarmupLRScheduler(10, lr_end=0.0, power=3.0, warmup=0.0),
         lambda it: torch.optim.lr_scheduler.PolynomialLR(it, 10, 3.0)),
        (lr_scheduler.CosineWarmupLRScheduler(10, warmup=0.0),
         lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, 10)),
    ],
)  # fmt: skip
def test_schedules_are_those_of_torch(schedule, torchs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    reference = torchs(optimizer)
    want = []
    for _ in range(10):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert rates(schedule, 10) == pytest.approx(want)
    assert schedule.get_last_lr() == [pytest.approx(want[-1])]


def test_a_schedule_of_ones_own_gives_one_rate():
    class Wrong(lr_scheduler.LRScheduler):
        def get_lr(self, train_step_info):
            return 0.1

    with pytest.raises(ValueError, match=r"Wrong: get_lr: got 0.1, want one number \[lr\]"):
        rates(Wrong(), 1)
    assert Wrong().get_last_lr() == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lr_scheduler.LinearWarmupLRScheduler(0), "total_steps: got 0, want at least 1"),
        (lambda: lr_scheduler.LinearWarmupLRScheduler(5, 1.0), "warmup: got 1.0, want 0 or more"),
        (lambda: lr_scheduler.CosineWarmupLRScheduler(5, 0), "cycles: got 0, want more than 0"),
        (lambda: lr_scheduler.PolyWarmupLRScheduler(5, -1.0), "lr_end: got -1.0, want 0 or more"),
        (lambda: lr_scheduler.PolyWarmupLRScheduler(5, 0, 0), "power: got 0, want more than 0"),
        (
            lambda: rates(lr_scheduler.PolyWarmupLRScheduler(5, 0.2, warmup=0.0), 1),
            r"lr_end: got 0.2, want less than lr, 0.1",
        ),
    ],
)
def test_wrong_schedules(make, words):
    with pytest.raises(ValueError, match=words):
        make()
