"""FusedAdam against its formulas in float64: modes, scale, clipping, state, what is refused."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_steps import SIZES, error, give, gradients, make_parameters, train, train_reference
from torch import Tensor, nn

import torch_ort
from torch_ort import _C, UserError
from torch_ort.optim import AdamWMode, FusedAdam

ARGUMENTS = [
    {},
    {"lr": 0.01, "weight_decay": 0.1},
    {"lr": 0.01, "weight_decay": 0.1, "bias_correction": False},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01},
]
EACH_MODE = pytest.mark.parametrize("mode", AdamWMode, ids=lambda mode: mode.name)


class Reference:
    """The formulas of the three modes, in float64."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: int = 1,
        weight_decay: float = 0.0,
    ) -> None:
        self.params = [param.detach().double().clone() for param in params]
        self.m = [torch.zeros_like(param) for param in self.params]
        self.v = [torch.zeros_like(param) for param in self.params]
        self.lr, self.eps, self.weight_decay = lr, eps, weight_decay
        self.betas, self.bias_correction, self.mode = betas, bias_correction, adam_w_mode
        self.t = 0

    def step(self, grads: list[Tensor | None]) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        c1 = 1 - beta1**self.t if self.bias_correction else 1
        c2 = 1 - beta2**self.t if self.bias_correction else 1
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            p, g = self.params[i], grad.double()
            if self.mode == 0:
                g = g + self.weight_decay * p
            if self.mode == 2:
                p = p - self.lr * self.weight_decay * p
            self.m[i] = m = beta1 * self.m[i] + (1 - beta1) * g
            self.v[i] = v = beta2 * self.v[i] + (1 - beta2) * g * g
            if self.mode == 2:
                p = p - self.lr / c1 * m / ((v / c2).sqrt() + self.eps)
            else:
                p = p - self.lr * math.sqrt(c2) / c1 * m / (v.sqrt() + self.eps)
            if self.mode == 1:
                p = p - self.lr * self.weight_decay * p
            self.params[i] = p


def assert_all_by_the_engine(count: int) -> None:
    counters = torch_ort.counters()
    assert counters["optimizer_parameters"] == count
    assert counters["optimizer_parameters_by_torch"] == 0


@EACH_MODE
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda it: ",".join(it) or "defaults")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 5e-7), (torch.bfloat16, 0.02), (torch.float16, 0.002)],
    ids=lambda it: str(it).removeprefix("torch."),
)
def test_formulas(mode, arguments: dict, dtype: torch.dtype, tolerance: float, isa: str) -> None:
    params = make_parameters(dtype)
    reference = Reference(params, adam_w_mode=mode, **arguments)
    train(FusedAdam(params, adam_w_mode=mode, **arguments))
    train_reference(reference, params)
    assert error(params, reference.params) < tolerance
    assert_all_by_the_engine(5 * len(params))


def test_defaults_are_those_of_onnx_runtime_training() -> None:
    (group,) = FusedAdam(make_parameters()).param_groups
    del group["params"]
    assert group == {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0
    }  # fmt: skip
    assert [(mode.name, int(mode)) for mode in AdamWMode] == [
        ("ADAM_L2_REGULARIZATION", 0), ("ADAMW_TRANSFORMERS", 1), ("ADAMW_TORCH", 2)
    ]  # fmt: skip
    params = make_parameters()
    reference = Reference(params, adam_w_mode=1, weight_decay=0.1)
    train(FusedAdam(params, weight_decay=0.1))
    train_reference(reference, params)
    assert error(params, reference.params) < 5e-7


@EACH_MODE
def test_errors_of_many_steps_do_not_add_up(mode) -> None:
    """A rounded factor of each step would: 0.999 is 1e-8 away from its float32."""
    settings_ = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8}
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5000))]
    theirs = [nn.Parameter(params[0].detach().clone())]
    exact = [nn.Parameter(params[0].detach().double())]
    reference = Reference(params, adam_w_mode=mode, **settings_)
    torch_class = torch.optim.Adam if mode == 0 else torch.optim.AdamW
    optimizers = [
        FusedAdam(params, adam_w_mode=mode, **settings_),
        torch_class(theirs, fused=True, **settings_),
        torch_class(exact, **settings_),
    ]
    for _ in range(500):
        params[0].grad = theirs[0].grad = torch.randn(5000)
        exact[0].grad = params[0].grad.double()
        reference.step([params[0].grad])
        for optimizer in optimizers:
            optimizer.step()
    wanted = reference.params[0]
    assert ((params[0].double() - wanted).norm() / wanted.norm()).item() < 1e-6
    assert error(params, [wanted]) < 1.5 * error(theirs, exact)


@EACH_MODE
def test_moments_of_short_floats_are_float32(mode) -> None:
    params = make_parameters(torch.bfloat16) + make_parameters(torch.float16)
    optimizer = FusedAdam(params, adam_w_mode=mode)
    reference = Reference(params)
    train(optimizer, 3)
    train_reference(reference, params, 3)
    for param, m, v in zip(params, reference.m, reference.v, strict=True):
        state = optimizer.state[param]
        assert state.keys() == {"exp_avg", "exp_avg_sq"}
        assert all(each.dtype == torch.float32 for each in state.values())
        torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-6)


def other_layouts() -> dict[str, Callable[[], nn.Parameter]]:
    return {
        "transposed": lambda: nn.Parameter(torch.randn(33, 65).t()),
        "channels_last": lambda: nn.Parameter(
            torch.randn(2, 3, 9, 65).to(memory_format=torch.channels_last)
        ),
        "in_the_middle": lambda: nn.Parameter(torch.randn(3000)[700:2100]),
        "holes": lambda: nn.Parameter(torch.randn(60, 3)[::2]),
        "complex": lambda: nn.Parameter(torch.randn(30, dtype=torch.complex64)),
    }


@EACH_MODE
@pytest.mark.parametrize("layout", other_layouts())
def test_layouts(mode, layout: str) -> None:
    torch.manual_seed(0)
    param = other_layouts()[layout]()
    plain = torch.view_as_real(param) if param.is_complex() else param
    reference = Reference([plain], adam_w_mode=mode, weight_decay=0.1)
    optimizer = FusedAdam([param], adam_w_mode=mode, weight_decay=0.1)
    strides = param.stride()
    for _ in range(4):
        param.grad = torch.empty_like(param).copy_(torch.randn_like(param))
        real = torch.view_as_real(param.grad) if param.is_complex() else param.grad
        optimizer.step()
        reference.step([real])
    got = torch.view_as_real(param.detach()) if param.is_complex() else param
    assert error([got], reference.params) < 5e-7
    assert param.stride() == strides
    assert torch_ort.counters()["optimizer_parameters"] == (0 if layout == "holes" else 4)


@EACH_MODE
@pytest.mark.parametrize("arguments", [{}, {"grad_scale": 8.0}, {"max_norm": 0.1}], ids=str)
def test_a_gradient_of_another_layout_is_left_to_torch(mode, arguments: dict) -> None:
    """The same comes out, whoever updates and whoever computes the norm."""
    results = []
    for transposed in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(30, 40)), nn.Parameter(torch.randn(7).bfloat16())]
        optimizer = FusedAdam(params, adam_w_mode=mode, weight_decay=0.1)
        for _ in range(3):
            give(params, [torch.randn(30, 40), torch.randn(7)])
            if transposed:
                params[0].grad = params[0].grad.t().contiguous().t()
                params[1].grad = torch.stack([params[1].grad] * 2, 1)[:, 0]
            optimizer.step(**arguments)
        results.append(params)
    torch.testing.assert_close(results[0], results[1], rtol=2e-6, atol=1e-6)
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 6


@EACH_MODE
def test_a_late_gradient_counts_as_its_group_does(mode) -> None:
    params = make_parameters(sizes=[(50,)] * 3)
    optimizer = FusedAdam(params, adam_w_mode=mode, lr=0.01)
    reference = Reference(params, adam_w_mode=mode, lr=0.01)
    assert "step" not in optimizer.param_groups[0]
    for number, present in enumerate(([0], [0, 1], [1], [], [0, 1, 2]), 1):
        grads = [g if i in present else None for i, g in enumerate(gradients(params, number))]
        give(params, grads)
        optimizer.step()
        reference.step(grads)
        assert optimizer.param_groups[0]["step"] == number
    assert error(params, reference.params) < 5e-7
    assert torch_ort.counters()["optimizer_parameters"] == 7


def test_groups_schedule_closure_and_hooks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(11, 5, dtype=torch.float64)
    groups = [
        {"params": model[0].parameters(), "lr": 0.3, "eps": 0.1},
        {"params": model[2].parameters(), "weight_decay": 0.2, "bias_correction": False},
    ]
    optimizer = FusedAdam(groups, lr=0.1)
    references = [
        Reference(list(model[0].parameters()), lr=0.3, eps=0.1),
        Reference(list(model[2].parameters()), lr=0.1, weight_decay=0.2, bias_correction=False),
    ]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for number in range(6):
        loss = optimizer.step(closure)
        assert loss.requires_grad
        for part, reference in zip((model[0], model[2]), references, strict=True):
            reference.step([param.grad for param in part.parameters()])
        schedule.step()
        if number % 2 == 1:
            for reference in references:
                reference.lr *= 0.5
    assert calls == ["before", "after"] * 6
    got = list(model.parameters())
    assert error(got, references[0].params + references[1].params) < 1e-14


def test_a_tensor_may_be_the_learning_rate() -> None:
    params = make_parameters()
    reference = Reference(params, lr=0.05)
    train(FusedAdam(params, lr=torch.tensor(0.05)))
    train_reference(reference, params)
    assert error(params, reference.params) < 5e-7
    assert_all_by_the_engine(5 * len(params))


@pytest.mark.parametrize(
    ("set_grad_none", "set_to_none", "dropped"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_zero_grad(set_grad_none: bool, set_to_none: bool, dropped: bool) -> None:
    params = make_parameters()
    give(params, gradients(params, 0))
    FusedAdam(params, set_grad_none=set_grad_none).zero_grad(set_to_none=set_to_none)
    if dropped:
        assert all(param.grad is None for param in params)
    else:
        assert all(not param.grad.any() for param in params)


def test_sparse_gradients_are_refused_before_anything_is_updated() -> None:
    weight, other = nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.randn(3))
    optimizer = FusedAdam([other, weight])
    nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True).sum().backward()
    other.grad, before = torch.ones(3), other.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"FusedAdam: gradients: got a sparse one.*torch\.optim\.SparseAdam"
    ):
        optimizer.step()
    assert torch.equal(other, before)
    assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -1}, "FusedAdam: lr: got -1.0, want 0 or more"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]: got 1.0, want 0 or more and less than 1"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]: got -0.1"),
        ({"eps": -1e-8}, "eps: got -1e-08"),
        ({"weight_decay": math.nan}, "weight_decay: got nan"),
        ({"adam_w_mode": 3}, "3 is not a valid AdamWMode"),
    ],
)
def test_bad_arguments(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FusedAdam(make_parameters(), **arguments)


def test_bad_arguments_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_parameters()
    optimizer = FusedAdam(params)
    give(params, gradients(params, 0))
    with pytest.raises(ValueError, match=r"grad_scale: got 0.0, want more than 0"):
        optimizer.step(grad_scale=0)
    with pytest.raises(ValueError, match=r"max_norm: got -1, want 0 or more"):
        optimizer.step(max_norm=-1)
    monkeypatch.setenv("TORCH_ORT_ISA", "avx3")
    with pytest.raises(UserError, match="TORCH_ORT_ISA: got 'avx3'"):
        FusedAdam(params)


# Scale, infinities, clipping.


@EACH_MODE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_scale_is_taken_back_and_gradients_stay(mode, dtype: torch.dtype) -> None:
    params = make_parameters(dtype)
    want = copy.deepcopy(params)
    optimizer, plain = FusedAdam(params, adam_w_mode=mode), FusedAdam(want, adam_w_mode=mode)
    for seed in range(3):
        grads = gradients(params, seed)
        give(want, grads)
        plain.step()
        give(params, [grad * 16 for grad in grads])
        optimizer.step(grad_scale=torch.tensor(16.0))
        assert all(torch.equal(p.grad, g * 16) for p, g in zip(params, grads, strict=True))
        assert not optimizer.step_skipped
        assert optimizer.grad_norm is None
    assert all(map(torch.equal, params, want))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("arguments", [{"grad_scale": 4.0}, {"max_norm": 1.0}], ids=str)
@pytest.mark.parametrize("layout", ["dense", "left to torch"])
def test_nothing_is_updated_where_a_gradient_is_not_finite(bad, arguments, layout: str) -> None:
    params = make_parameters()
    before = copy.deepcopy(params)
    optimizer = FusedAdam(params)
    give(params, gradients(params, 0))
    params[-2].grad[20, 30] = bad
    if layout == "left to torch":
        params[-2].grad = params[-2].grad.t().contiguous().t()
    assert optimizer.step(**arguments) is None
    assert optimizer.step_skipped
    assert all(map(torch.equal, params, before))
    assert not optimizer.state
    assert "step" not in optimizer.param_groups[0]
    train(optimizer, 1, **arguments)
    assert not optimizer.step_skipped
    assert optimizer.param_groups[0]["step"] == 1
    assert not any(map(torch.equal, params[2:], before[2:]))


def test_what_was_found_before_is_believed() -> None:
    params = make_parameters()
    before = copy.deepcopy(params)
    optimizer = FusedAdam(params)
    train(optimizer, 1, found_inf=torch.tensor(1.0))
    assert optimizer.step_skipped
    assert all(map(torch.equal, params, before))
    train(optimizer, 1, found_inf=torch.tensor(0.0), grad_scale=2.0)
    assert not optimizer.step_skipped
    assert optimizer.param_groups[0]["step"] == 1


def test_large_gradients_are_finite() -> None:
    """Their squares are beyond float32."""
    param = nn.Parameter(torch.zeros(3000))
    optimizer = FusedAdam([param])
    param.grad = torch.full((3000,), 3e38)
    optimizer.step(max_norm=1.0)
    assert not optimizer.step_skipped
    assert optimizer.grad_norm == pytest.approx(3e38 * math.sqrt(3000))


@EACH_MODE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_clipping_equals_clip_grad_norm(mode, dtype: torch.dtype, scale: float | None) -> None:
    params = make_parameters(dtype)
    reference = Reference(params, adam_w_mode=mode)
    optimizer = FusedAdam(params, adam_w_mode=mode)
    # All; none, since the norm is 75 to 80.
    for seed, max_norm in enumerate((1.0, 30.0, 1000.0, 0.0)):
        grads = gradients(params, seed)
        exact = [nn.Parameter(grad.double()) for grad in grads]
        give(exact, grads)
        norm = nn.utils.clip_grad_norm_(exact, max_norm)
        reference.step([param.grad for param in exact])
        give(params, [grad * (scale or 1) for grad in grads])
        optimizer.step(grad_scale=scale, max_norm=max_norm)
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    assert error(params, reference.params) < (0.02 if dtype == torch.bfloat16 else 5e-7)


def test_the_norm_is_one_of_all_groups() -> None:
    params = make_parameters()
    groups = [{"params": params[:5], "lr": 0.1}, {"params": params[5:]}]
    optimizer = FusedAdam(groups)
    train(optimizer, 1, max_norm=1.0)
    want = math.sqrt(sum(grad.double().square().sum().item() for grad in gradients(params, 0)))
    assert optimizer.grad_norm == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradient_scaler(unscale: bool, dtype: torch.dtype) -> None:
    if unscale and dtype == torch.float16:
        pytest.skip("GradScaler unscales no float16 itself")
    param = nn.Parameter(torch.ones(10, dtype=dtype))
    want = nn.Parameter(torch.ones(10, dtype=dtype))
    optimizer, plain = FusedAdam([param], lr=0.1), FusedAdam([want], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (torch.inf, 1.0, 2.0, torch.nan, 3.0):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if math.isfinite(factor):
            want.grad = torch.full((10,), factor, dtype=dtype)
            plain.step()
    assert torch.equal(param, want)
    assert scaler.get_scale() == 1.0
    assert optimizer.param_groups[0]["step"] == 3
    assert not hasattr(optimizer, "grad_scale")


def test_gradient_scaler_clips_what_it_has_scaled() -> None:
    params = make_parameters()
    reference = Reference(params)
    optimizer = FusedAdam(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    grads = gradients(params, 0)
    products = [(param * grad).sum() for param, grad in zip(params, grads, strict=True)]
    scaler.scale(sum(products)).backward()
    scaler.step(optimizer, max_norm=1.0)
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
    reference.step([grad.double() / (norm + 1e-6) for grad in grads])
    assert error(params, reference.params) < 5e-7


# State.


def adam_w(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-6)


def fused(params: list[nn.Parameter], **arguments) -> FusedAdam:
    mode = AdamWMode.ADAMW_TORCH
    return FusedAdam(params, lr=0.01, weight_decay=0.1, adam_w_mode=mode, **arguments)


def through_a_file(state_dict: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("first", [adam_w, fused])
@pytest.mark.parametrize("second", [adam_w, fused])
def test_states_pass_between_torch_and_us(first: Callable, second: Callable) -> None:
    params = make_parameters()
    reference = Reference(params, lr=0.01, weight_decay=0.1, adam_w_mode=2)
    optimizer = first(params)
    train(optimizer, 3)
    after = second(params)
    after.load_state_dict(through_a_file(optimizer.state_dict()))
    train(after, 3, first=3)
    train_reference(reference, params, 6)
    assert error(params, reference.params) < 1e-6
    states = after.state_dict()["state"]
    assert all(state["step"] == 6 for state in states.values())
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in states.values())


def test_state_of_torch_has_one_step_for_a_group() -> None:
    params = make_parameters(sizes=[(4,), (5,)])
    optimizer = adam_w(params)
    for present in ([0], [0, 1], [0]):
        grads = gradients(params, 0)
        give(params, [grads[i] if i in present else None for i in range(2)])
        optimizer.step()
    ours = fused(params)
    ours.load_state_dict(optimizer.state_dict())
    assert ours.param_groups[0]["step"] == 3
    assert all("step" not in state for state in ours.state.values())


def test_loading_keeps_what_is_saved_in_float32() -> None:
    params = make_parameters(torch.bfloat16)
    optimizer = fused(params)
    train(optimizer, 3)
    saved = through_a_file(optimizer.state_dict())
    copies = copy.deepcopy(params)
    other = fused(copies)
    other.load_state_dict(saved)
    train(optimizer, 3, first=3)
    train(other, 3, first=3)
    assert all(map(torch.equal, params, copies))
    theirs = adam_w(copies)
    theirs.load_state_dict(saved)
    assert theirs.state[copies[1]]["exp_avg"].dtype == torch.bfloat16
    other.load_state_dict(theirs.state_dict())
    assert other.state[copies[1]]["exp_avg"].dtype == torch.float32


def test_hooks_around_a_state_see_all_of_it() -> None:
    params = make_parameters(torch.bfloat16)
    optimizer = fused(params)
    train(optimizer, 2)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, packed: seen.append(packed["state"][0]))
    saved = optimizer.state_dict()
    assert seen[0]["step"] == 2

    def replaced(_: torch.optim.Optimizer, given: dict) -> dict:
        given = copy.deepcopy(given)
        given["state"][0]["exp_avg"] += 1.0001
        return given

    optimizer.register_load_state_dict_pre_hook(replaced)
    optimizer.register_load_state_dict_post_hook(
        lambda it: seen.append(it.state[params[0]]["exp_avg"])
    )
    want = optimizer.state[params[0]]["exp_avg"] + 1.0001
    optimizer.load_state_dict(saved)
    assert torch.equal(seen[1], want)
    assert optimizer.param_groups[0]["step"] == 2


def test_hooks_of_the_program_change_a_state_before_it_is_checked() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([parameter], lr=0.5, amsgrad=True)
    ours = FusedAdam([parameter])

    def without(optimizer, state):
        return {**state, "param_groups": [{**g, "amsgrad": False} for g in state["param_groups"]]}

    ours.register_load_state_dict_pre_hook(without)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_states_of_other_rules_are_refused(name: str) -> None:
    params = make_parameters()
    saved = torch.optim.AdamW(params, **{name: True}).state_dict()
    with pytest.raises(ValueError, match=rf"FusedAdam: state_dict: got one .* {name}=True"):
        fused(params).load_state_dict(saved)


@EACH_MODE
def test_copies_go_on_like_the_original(mode) -> None:
    params = make_parameters()
    optimizer = FusedAdam(params, adam_w_mode=mode, weight_decay=0.1, set_grad_none=False)
    train(optimizer, 3)
    pair = copy.deepcopy((params, optimizer))
    read = pickle.loads(pickle.dumps((params, optimizer)))
    for some, its_optimizer in ((params, optimizer), pair, read):
        assert its_optimizer.param_groups[0]["params"][0] is some[0]
        train(its_optimizer, 3, first=3)
        its_optimizer.zero_grad(set_to_none=False)
        assert some[0].grad is not None
    assert all(map(torch.equal, params, pair[0]))
    assert all(map(torch.equal, params, read[0]))


@EACH_MODE
@pytest.mark.parametrize("arguments", [{}, {"grad_scale": 8.0, "max_norm": 1.0}], ids=str)
def test_results_are_the_same_for_any_number_of_threads(mode, arguments: dict) -> None:
    first = make_parameters(sizes=[*SIZES, (300, 1000)])
    second = copy.deepcopy(first)
    threads = torch.get_num_threads()
    norms = []
    try:
        for params, count in ((first, 1), (second, 2)):
            torch.set_num_threads(count)
            optimizer = FusedAdam(params, adam_w_mode=mode)
            train(optimizer, **arguments)
            norms.append(optimizer.grad_norm)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, first, second))
    assert norms[0] == norms[1]


def test_special_values() -> None:
    values = [0.0, -0.0, 1e-45, 1e38, torch.inf, -torch.inf, torch.nan, 1.0]
    pairs = torch.tensor(list(itertools.product(values, values)))
    got = [nn.Parameter(pairs[:, 0].clone())]
    want = copy.deepcopy(got)
    for params, optimizer in ((got, fused(got)), (want, adam_w(want))):
        for _ in range(3):
            params[0].grad = pairs[:, 1].clone()
            optimizer.step()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    param = nn.Parameter(torch.randn(10))
    loss = (param * param).sum()
    param.grad = torch.ones(10)
    FusedAdam([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_engine_refuses_lists_that_do_not_fit() -> None:
    one = [torch.ones(2)]
    with pytest.raises(UserError, match="gradients: got 0 of them, want 1"):
        _C.adam_update(one, [], one, one, [0], [_C.AdamRule()], isa="")
    with pytest.raises(UserError, match="number of a rule: got 1, want one of 1"):
        _C.adam_update(one, one, one, one, [1], [_C.AdamRule()], isa="")
    with pytest.raises(AttributeError, match="speed"):
        _C.AdamRule(speed=1.0)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(AdamWMode),
    st.sampled_from(ARGUMENTS),
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_any_sizes(mode, arguments: dict, sizes: list[list[int]], count: int) -> None:
    params = make_parameters(torch.float64, [tuple(size) for size in sizes])
    reference = Reference(params, adam_w_mode=mode, **arguments)
    train(FusedAdam(params, adam_w_mode=mode, **arguments), count)
    train_reference(reference, params, count)
    for got, want in zip(params, reference.params, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-12, atol=1e-12)
