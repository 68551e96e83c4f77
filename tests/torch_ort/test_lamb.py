"""Lamb and LambConfig against the formulas in float64."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from optimizer_steps import SIZES, error, gradients, make_parameters, train, train_reference
from torch import Tensor, nn

import torch_ort
from torch_ort.optim import Lamb, LambConfig

ARGUMENTS = [
    {},
    {"lr": 0.01, "weight_decay": 0.1},
    {"lr": 0.01, "weight_decay": 0.1, "bias_correction": True},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "ratio_min": 0.5, "ratio_max": 0.9},
    {"lr": 0.02, "ratio_max": 1e-3},
    {"lr": 1e-4, "ratio_min": 20.0, "ratio_max": 30.0},
]


class Reference:
    """The formulas in float64."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
    ) -> None:
        self.params = [param.detach().double().clone() for param in params]
        self.m = [torch.zeros_like(param) for param in self.params]
        self.v = [torch.zeros_like(param) for param in self.params]
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.bias_correction, self.limits = bias_correction, (ratio_min, ratio_max)
        self.t = 0

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        c1, c2 = (1 - beta1**self.t, 1 - beta2**self.t) if self.bias_correction else (1, 1)
        for i, grad in enumerate(grads):
            p, g = self.params[i], grad.double()
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * g * g
            r = (self.m[i] / c1) / ((self.v[i] / c2).sqrt() + self.eps) + self.weight_decay * p
            of_p, of_r = p.norm().item(), r.norm().item()
            ratio = of_p / of_r if of_p != 0 and of_r != 0 else 1.0
            ratio = max(self.limits[0], min(self.limits[1], ratio))
            self.params[i] = p - self.lr * ratio * r


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda it: ",".join(it) or "defaults")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 5e-7), (torch.bfloat16, 0.02), (torch.float16, 0.002)],
    ids=lambda it: str(it).removeprefix("torch."),
)
def test_formulas(arguments: dict, dtype: torch.dtype, tolerance: float, isa: str) -> None:
    params = make_parameters(dtype)
    reference = Reference(params, **arguments)
    optimizer = Lamb(params, **arguments)
    train(optimizer)
    train_reference(reference, params)
    assert error(params, reference.params) < tolerance
    assert torch_ort.counters()["optimizer_parameters"] == 5 * len(params)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(each.dtype == want for each in optimizer.state[params[0]].values())


@pytest.mark.parametrize("arguments", ARGUMENTS[1:4], ids=",".join)
def test_what_is_left_to_torch_is_the_same(arguments: dict) -> None:
    results = []
    for transposed in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(30, 40)), nn.Parameter(torch.randn(20, 7).bfloat16())]
        optimizer = Lamb(params, **arguments)
        for _ in range(3):
            for param in params:
                grad = torch.randn(param.shape).to(param.dtype)
                param.grad = grad.t().contiguous().t() if transposed else grad
            optimizer.step(max_norm=1.0)
        results.append(params)
    torch.testing.assert_close(results[0], results[1], rtol=2e-6, atol=1e-6)
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 6


def test_zeros_move_at_the_learning_rate() -> None:
    """The norm of a parameter, or of its direction, may be 0: there is no ratio then."""
    params = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(5))]
    optimizer = Lamb(params, lr=0.1, eps=0.0, betas=(0.0, 0.0))
    params[0].grad, params[1].grad = torch.full((5,), 3.0), torch.zeros(5)
    optimizer.param_groups[0]["eps"] = 1e-12
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((5,), -0.1))
    assert torch.equal(params[1], torch.ones(5))


def test_scale_clipping_and_infinities() -> None:
    params = make_parameters()
    reference = Reference(params, lr=0.01)
    optimizer = Lamb(params, lr=0.01, max_norm=1.0)
    for seed in range(3):
        grads = gradients(params, seed)
        exact = [nn.Parameter(grad.double()) for grad in grads]
        for param, grad in zip(exact, grads, strict=True):
            param.grad = grad.double()
        norm = nn.utils.clip_grad_norm_(exact, 1.0).item()
        reference.step([param.grad for param in exact])
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad * 4
        optimizer.step(grad_scale=4.0)
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-12)
    assert error(params, reference.params) < 5e-7
    params[3].grad[1] = torch.nan
    before = copy.deepcopy(params)
    optimizer.step()
    assert optimizer.step_skipped
    assert all(map(torch.equal, params, before))
    assert optimizer.param_groups[0]["step"] == 3


def test_results_are_the_same_for_any_number_of_threads() -> None:
    first = make_parameters(sizes=[*SIZES, (300, 1000)])
    second = copy.deepcopy(first)
    threads = torch.get_num_threads()
    try:
        for params, count in ((first, 1), (second, 2)):
            torch.set_num_threads(count)
            train(Lamb(params, weight_decay=0.1))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, first, second))


def test_state_dict_and_copies() -> None:
    params = make_parameters(torch.bfloat16)
    optimizer = Lamb(params, weight_decay=0.1, bias_correction=True, max_norm=0.5)
    train(optimizer, 3)
    pair = copy.deepcopy((params, optimizer))
    read = pickle.loads(pickle.dumps((params, optimizer)))
    loaded = copy.deepcopy(params)
    other = Lamb(loaded, max_norm=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for its_optimizer in (optimizer, pair[1], read[1], other):
        train(its_optimizer, 3, first=3)
        assert its_optimizer.grad_norm is not None
    for some in (pair[0], read[0], loaded):
        assert all(map(torch.equal, params, some))


def test_sparse_gradients_are_refused() -> None:
    weight = nn.Parameter(torch.randn(10, 4))
    optimizer = Lamb([weight])
    nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="Lamb: gradients: got a sparse one"):
        optimizer.step()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="Lamb: ratio_min: got 2, want at most 1"):
        Lamb(make_parameters(), ratio_min=2, ratio_max=1)
    with pytest.raises(ValueError, match="Lamb: eps: got -1"):
        Lamb(make_parameters(), eps=-1)


# LambConfig.


def test_config_has_the_defaults_of_onnx_runtime_training() -> None:
    config = LambConfig()
    assert config.name == "LambOptimizer"
    assert config.params == []
    assert config.defaults == {
        "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "ratio_min": -math.inf,
        "ratio_max": math.inf, "epsilon": 1e-6, "max_norm_clip": 1.0, "do_bias_correction": False,
    }  # fmt: skip
    assert all(getattr(config, name) == value for name, value in config.defaults.items())


def test_config_makes_the_optimizer_of_a_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    config = LambConfig(
        params=[{"params": ["0.bias", "1.bias"], "lambda_coef": 0.0, "alpha": 0.8}],
        lr=0.01, lambda_coef=0.1, beta=0.95, epsilon=1e-4, max_norm_clip=0.5, ratio_max=2.0,
        do_bias_correction=True,
    )  # fmt: skip
    optimizer = config.optimizer(model.named_parameters())
    shared = {"eps": 1e-4, "bias_correction": True, "ratio_max": 2.0, "lr": 0.01}
    biases, weights = [model[0].bias, model[1].bias], [model[0].weight, model[1].weight]
    first = Reference(biases, betas=(0.8, 0.95), **shared)
    second = Reference(weights, betas=(0.9, 0.95), weight_decay=0.1, **shared)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        grads = [param.grad.double() for param in (*biases, *weights)]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        grads = [grad * min(1.0, 0.5 / (norm.item() + 1e-6)) for grad in grads]
        optimizer.step()
        first.step(grads[:2])
        second.step(grads[2:])
    assert error([*biases, *weights], first.params + second.params) < 5e-7


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"lambda_coef": 0.1}], "params: got None, want a list of names"),
        ([{"params": ["weight", 3]}], "params: got .* want a list of names"),
        ([{"params": ["weight"], "lr": 0.1}], "group: got 'lr', want some of alpha, beta"),
        ([{"params": ["weigth"]}], "params: got 'weigth', want a parameter of no other group"),
        ([{"params": ["bias"]}, {"params": ["bias"]}], "params: got 'bias', want a parameter"),
    ],
)
def test_bad_configs(groups: list[dict], words: str) -> None:
    with pytest.raises(ValueError, match=f"LambConfig: {words}"):
        LambConfig(groups).optimizer(nn.Linear(2, 2).named_parameters())
