"""torch_ort.optim against torch.optim in float64: formulas, layouts, state, what is left out."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_steps import error, errors, give, gradients, like, make_parameters, train
from torch import Tensor, nn

import torch_ort
from torch_ort import _C, UserError

# Name of the class, arguments.
VARIANTS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    *itertools.product(["Adam", "AdamW"], [
        {"lr": 0.01}, {"lr": 0.01, "weight_decay": 0}, {"lr": 0.01, "maximize": True},
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
        {"lr": 0.01, "amsgrad": True},
        {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1},
    ]),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
]  # fmt: skip
EACH_VARIANT = pytest.mark.parametrize(
    ("name", "arguments"), VARIANTS, ids=lambda value: str(value).replace(" ", "")
)
EACH_CLASS = pytest.mark.parametrize(
    ("name", "arguments"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"amsgrad": True}), ("AdamW", {})],
    ids=["SGD", "Adam", "AdamW"],
)
# Around the length of a tile; no element, and no dim.
SIZES = [(), (0,), (1,), (3,), (1023,), (1024,), (1025,), (7, 5), (33, 100), (2, 3, 4, 5)]


def ours(name: str, params: list[nn.Parameter], **arguments) -> torch.optim.Optimizer:
    return getattr(torch_ort.optim, name)(params, **arguments)


def theirs(name: str, params: list[nn.Parameter], **arguments) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(params, foreach=False, **arguments)


def assert_all_ours(params: list[nn.Parameter], count: int) -> None:
    counters = torch_ort.counters()
    assert counters["optimizer_parameters"] == count * len(params)
    assert counters["optimizer_parameters_by_torch"] == 0


@EACH_VARIANT
def test_formulas(name: str, arguments: dict, isa: str) -> None:
    want = make_parameters(torch.float64, SIZES)
    with torch.no_grad():
        for param in want:
            param.copy_(param.float())
    exact, eager, got = like(want), like(want, torch.float32), like(want, torch.float32)
    train(theirs(name, want, **arguments), rounded_to=torch.float32)
    train(ours(name, exact, **arguments), rounded_to=torch.float32)
    train(theirs(name, eager, **arguments))
    train(ours(name, got, **arguments))
    assert error(exact, want) < 1e-14
    assert error(got, want) < max(1.5 * error(eager, want), 1e-7)
    assert errors(got, want).mean() < 1.1 * errors(eager, want).mean()
    assert_all_ours(got, 2 * 5)


@EACH_CLASS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_rounded_once_a_step(
    name: str, arguments: dict, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    if name != "SGD":  # the defaults are below what these types resolve
        arguments = {**arguments, "lr": 0.1, "eps": 1e-4}
    got = make_parameters(dtype, SIZES)
    want, eager = like(got, torch.float64), like(got)
    train(theirs(name, want, **arguments), rounded_to=dtype)
    train(theirs(name, eager, **arguments))
    train(ours(name, got, **arguments))
    assert errors(got, want).mean() <= errors(eager, want).mean()
    assert_all_ours(got, 5)


@EACH_CLASS
def test_state_of_float32_with_parameters_of_bfloat16(name: str, arguments: dict) -> None:
    got = make_parameters(torch.bfloat16, SIZES)
    want = like(got, torch.float64)
    optimizer = ours(name, got, **arguments)
    train(optimizer, 1)
    for state in optimizer.state.values():
        for key in state:
            state[key] = state[key].float()
    train(optimizer, 4, first=1)
    train(theirs(name, want, **arguments))
    assert error(got, want) < 0.02
    assert_all_ours(got, 5)


def layouts() -> dict[str, Callable[[], Tensor]]:
    return {
        "transposed": lambda: torch.randn(33, 65).t(),
        "channels_last": lambda: torch.randn(2, 3, 9, 65).to(memory_format=torch.channels_last),
        "permuted": lambda: torch.randn(5, 65, 7).permute(2, 0, 1),
        "in_the_middle": lambda: torch.randn(3000)[700:2100],
        "one_sized": lambda: torch.randn(1, 1, 1200, 1).expand(1, 1, 1200, 1),
    }


@EACH_CLASS
@pytest.mark.parametrize("layout", layouts())
def test_layouts(name: str, arguments: dict, layout: str) -> None:
    torch.manual_seed(0)
    got = [nn.Parameter(layouts()[layout]())]
    want = [nn.Parameter(got[0].detach().contiguous().double())]
    strides = got[0].stride()
    train(ours(name, got, **arguments))
    train(theirs(name, want, **arguments))
    assert error(got, want) < 1e-6
    assert got[0].stride() == strides
    assert_all_ours(got, 5)


def test_memory_around_a_parameter_stays() -> None:
    memory = torch.randn(3000)
    before = memory.clone()
    param = nn.Parameter(memory[700:2100])
    train(ours("AdamW", [param]))
    assert torch.equal(memory[:700], before[:700])
    assert torch.equal(memory[2100:], before[2100:])
    assert not torch.equal(memory[700:2100], before[700:2100])


def left_out() -> dict[str, Callable[[], tuple[nn.Parameter, Tensor]]]:
    def grad_of_another_layout() -> tuple[nn.Parameter, Tensor]:
        return nn.Parameter(torch.randn(30, 40)), torch.randn(40, 30).t()

    def expanded_grad() -> tuple[nn.Parameter, Tensor]:
        return nn.Parameter(torch.randn(30, 40)), torch.randn(30, 1).expand(30, 40)

    def complex_numbers() -> tuple[nn.Parameter, Tensor]:
        return (
            nn.Parameter(torch.randn(30, dtype=torch.complex64)),
            torch.randn(30, dtype=torch.complex64),
        )

    def holes() -> tuple[nn.Parameter, Tensor]:
        return nn.Parameter(torch.randn(60)[::2]), torch.randn(60)[::2]

    return {
        made.__name__: made
        for made in (grad_of_another_layout, expanded_grad, complex_numbers, holes)
    }


@EACH_CLASS
@pytest.mark.parametrize("case", left_out())
def test_what_is_left_to_torch(name: str, arguments: dict, case: str) -> None:
    torch.manual_seed(0)
    param, grad = left_out()[case]()
    other = nn.Parameter(torch.randn(100))
    got, want = [param, other], like([param, other])
    optimizers = ours(name, got, **arguments), theirs(name, want, **arguments)
    for optimizer, params in zip(optimizers, (got, want), strict=True):
        for _ in range(4):
            params[0].grad, params[1].grad = grad, torch.ones(100)
            optimizer.step()
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0)
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-6)
    assert torch_ort.counters()["optimizer_parameters"] == 4
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 4


@EACH_CLASS
def test_a_tensor_as_learning_rate_is_left_to_torch(name: str, arguments: dict) -> None:
    got = make_parameters(torch.float32, SIZES)
    want = like(got)
    arguments = {**arguments, "lr": torch.tensor(0.05)}
    train(ours(name, got, **arguments))
    train(theirs(name, want, **arguments))
    assert all(map(torch.equal, got, want))
    assert torch_ort.counters()["optimizer_parameters"] == 0


def test_sparse_gradients() -> None:
    weight = nn.Parameter(torch.randn(10, 4))
    want = like([weight])[0]
    for params in ([weight], [want]):
        make = ours if params[0] is weight else theirs
        optimizer = make("SGD", params, lr=0.1)
        torch.nn.functional.embedding(torch.tensor([1, 3]), params[0], sparse=True).sum().backward()
        optimizer.step()
    assert torch.equal(weight, want)
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        ours("AdamW", [weight]).step()


@EACH_CLASS
def test_gradients_that_come_and_go(name: str, arguments: dict) -> None:
    got = make_parameters(torch.float32, [(50,)] * 3)
    want = like(got, torch.float64)
    optimizers = ours(name, got, **arguments), theirs(name, want, **arguments)
    for optimizer, params in zip(optimizers, (got, want), strict=True):
        for present in ([0], [0, 1], [1], [0, 1, 2]):
            give(params, gradients(params, len(present)))
            for i, param in enumerate(params):
                if i not in present:
                    param.grad = None
            optimizer.step()
    assert error(got, want) < 1e-6


@EACH_CLASS
def test_state_dicts_pass_between_torch_and_us(name: str, arguments: dict) -> None:
    got = make_parameters(torch.float32, SIZES)
    want = like(got)
    first = ours(name, got, **arguments)
    train(first, 3)
    second = theirs(name, got, **arguments)
    second.load_state_dict(first.state_dict())
    train(second, 3, first=3)
    third = ours(name, got, **arguments)
    third.load_state_dict(second.state_dict())
    train(third, 3, first=6)
    reference = theirs(name, want, **arguments)
    train(reference, 9)
    assert error(got, [param.double() for param in want]) < 1e-6
    for mine, other in zip(third.state.values(), reference.state.values(), strict=True):
        assert mine.keys() == other.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], other[key], rtol=1e-5, atol=1e-6)


@EACH_CLASS
def test_copies_go_on_like_the_original(name: str, arguments: dict) -> None:
    params = make_parameters(torch.float32, SIZES)
    optimizer = ours(name, params, **arguments)
    train(optimizer, 3)
    pair = copy.deepcopy((params, optimizer))
    buffer = io.BytesIO()
    pickle.dump((params, optimizer), buffer)
    buffer.seek(0)
    read = pickle.load(buffer)
    for some, its_optimizer in ((params, optimizer), pair, read):
        assert its_optimizer.param_groups[0]["params"][0] is some[0]
        train(its_optimizer, 3, first=3)
    assert all(map(torch.equal, params, pair[0]))
    assert all(map(torch.equal, params, read[0]))


@EACH_CLASS
def test_schedule_closure_groups_and_hooks(name: str, arguments: dict) -> None:
    torch.manual_seed(0)
    results = []
    for make in (ours, theirs):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        x = torch.randn(11, 5, dtype=torch.float64)
        groups = [
            {"params": model[0].parameters(), "lr": 0.3},
            {"params": model[2].parameters(), "weight_decay": 0.2},
        ]
        optimizer = make(name, groups, **arguments)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        calls = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))

        def closure(model: nn.Module = model, x: Tensor = x, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(6):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert calls == ["before", "after"] * 6
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-12)


def test_gradient_scaler_skips_a_step_with_infinities() -> None:
    param = nn.Parameter(torch.ones(10))
    optimizer = ours("AdamW", [param])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((param * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(10))
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    want = nn.Parameter(torch.ones(10))
    want.grad = torch.ones(10)
    theirs("AdamW", [want]).step()
    torch.testing.assert_close(param, want)


@EACH_CLASS
def test_special_values(name: str, arguments: dict) -> None:
    values = [0.0, -0.0, 1e-45, 1e38, torch.inf, -torch.inf, torch.nan, 1.0]
    pairs = torch.tensor(list(itertools.product(values, values)))
    got = [nn.Parameter(pairs[:, 0].clone())]
    want = like(got)
    for params, make in ((got, ours), (want, theirs)):
        optimizer = make(name, params, **arguments)
        for _ in range(3):
            params[0].grad = pairs[:, 1].clone()
            optimizer.step()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, equal_nan=True)


@EACH_CLASS
def test_results_are_the_same_for_any_number_of_threads(name: str, arguments: dict) -> None:
    first = make_parameters(torch.float32, [*SIZES, (300, 1000)])
    second = like(first)
    threads = torch.get_num_threads()
    try:
        for params, count in ((first, 1), (second, 2)):
            torch.set_num_threads(count)
            train(ours(name, params, **arguments))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, first, second))


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    param = nn.Parameter(torch.randn(10))
    loss = (param * param).sum()
    param.grad = torch.ones(10)
    ours("SGD", [param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_arguments_raise_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        ours("AdamW", [param], lr=-1)
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        ours("SGD", [param], nesterov=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fused'"):
        ours("AdamW", [param], fused=True)
    monkeypatch.setenv("TORCH_ORT_ISA", "avx3")
    with pytest.raises(UserError, match="TORCH_ORT_ISA: got 'avx3'"):
        ours("AdamW", [param])


def test_lists_of_other_lengths_raise() -> None:
    one = [torch.ones(2)]
    settings_ = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    with pytest.raises(UserError, match="gradients: got 0 of them, want 1"):
        _C.sgd_step(one, [], [], [], **settings_, nesterov=False, maximize=False, isa="")


def test_trains_a_compiled_model() -> None:
    results = []
    for backend, module in (("ort", torch_ort.optim), ("eager", torch.optim)):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.LayerNorm(30), nn.Linear(30, 4))
        x, y = torch.randn(16, 20), torch.randint(4, (16,))
        compiled = torch.compile(model, backend=backend)
        optimizer = module.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(20):
            loss = nn.functional.cross_entropy(compiled(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert results[0][-1] < results[0][0] / 2
    assert torch_ort.counters()["optimizer_parameters_by_torch"] == 0


@pytest.mark.hands_over("the function writes into parameters")
def test_a_step_inside_of_a_compiled_function() -> None:
    torch.compiler.reset()
    params = make_parameters(torch.float32, [(40,)])
    want = like(params)
    optimizer = ours("AdamW", params)

    @torch.compile(backend="ort")
    def train(x: Tensor) -> Tensor:
        loss = (params[0] * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    reference = theirs("AdamW", want)
    for _ in range(3):
        optimizer.zero_grad()
        train(torch.ones(40))
        reference.zero_grad()
        want[0].sum().backward()
        reference.step()
    torch.testing.assert_close(params, want)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(VARIANTS),
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 2**31),
)
def test_any_sizes(variant: tuple, sizes: list[list[int]], count: int, seed: int) -> None:
    name, arguments = variant
    want = make_parameters(torch.float64, [tuple(size) for size in sizes], seed)
    got = like(want)
    train(theirs(name, want, **arguments), count)
    train(ours(name, got, **arguments), count)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
