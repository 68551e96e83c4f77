"""RMS norms on GPUs: there PyTorch has one operator for each half, which regions take in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import roads
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torch_ort
from torch_ort.rules import shape_rules
from torch_ort.rules.forms import spec_of

pytestmark = pytest.mark.cuda

NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Norm(nn.Module):
    """An RMS norm between computations that it can be fused with."""

    def __init__(self, shape: tuple[int, ...], eps: float | None = None, weight: bool = True):
        super().__init__()
        self.norm = nn.RMSNorm(shape, eps, weight)
        if weight:
            nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.sin(x)))


# The model, the sizes of what it is given, and whether the input wants a gradient.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "rows": (lambda: Norm((24,)), (5, 7, 24), True),
    "epsilon": (lambda: Norm((24,), 0.1), (35, 24), True),
    "no weight": (lambda: Norm((24,), weight=False), (35, 24), True),
    "two dims": (lambda: Norm((3, 8)), (5, 3, 8), True),
    "one row": (lambda: Norm((24,)), (24,), True),
    "one number": (lambda: Norm((1,)), (5, 1), True),
    "long rows": (lambda: Norm((5000,)), (3, 5000), True),
    "gradient of the weight alone": (lambda: Norm((24,)), (5, 7, 24), False),
    "empty": (lambda: Norm((24,)), (0, 24), True),
}


def step(run: Callable, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Give the result and all gradients in float64 on the CPU, for the same numbers each time."""
    model.zero_grad()
    leaf = x.detach().requires_grad_(x.requires_grad)
    y = run(leaf)
    weights = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    y.backward(weights)
    grads = [leaf.grad, *(p.grad for p in model.parameters())]
    return [each.detach().double().cpu() for each in (y, *grads) if each is not None]


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], near: float) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=near, atol=near * scale)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("road", roads.ROADS)
def test_step(road: str, case: str, dtype: torch.dtype) -> None:
    make, sizes, wants_gradient = CASES[case]
    torch.manual_seed(0)
    model = make().to("cuda", dtype)
    x = torch.randn(sizes).to("cuda", dtype).requires_grad_(wants_gradient)
    eager = step(model, model, x)
    wide = make().double()
    wide.load_state_dict(model.state_dict())
    if wide.norm.eps is None and dtype is not torch.float64:
        wide.norm.eps = torch.finfo(torch.float32).eps
    exact = step(wide, wide, x.detach().double().cpu().requires_grad_(wants_gradient))
    before = torch_ort.counters()
    got = step(roads.ROADS[road](model), model, x)
    assert torch_ort.counters()["fallbacks"] == before["fallbacks"]
    assert_near(got, exact, NEAR[dtype])
    assert_near(got, eager, NEAR[dtype])


def operators_of_norms(run: Callable) -> Counter[str]:
    """Count the calls of PyTorch's operators for RMS norms."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = (event.name for event in profile.events())
    return Counter(name for name in names if name.startswith("aten::_fused_rms_norm"))


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no weight"])
def test_no_norm_is_an_operator_of_pytorch(weight: bool) -> None:
    model = Norm((24,), weight=weight).cuda()
    x = torch.randn(35, 24, device="cuda", requires_grad=True)
    compiled = torch.compile(model, backend="ort")
    step(compiled, model, x)
    both = {"aten::_fused_rms_norm": 1, "aten::_fused_rms_norm_backward": 1}
    assert operators_of_norms(lambda: step(model, model, x)) == both
    assert not operators_of_norms(lambda: step(compiled, model, x))
    with torch.no_grad():  # a graph of the forward half alone
        torch.testing.assert_close(compiled(x), model(x))
        assert not operators_of_norms(lambda: compiled(x))


def test_sizes_that_change() -> None:
    torch.manual_seed(0)
    model = Norm((24,)).cuda()
    compiled = torch.compile(model, backend="ort")
    before = torch_ort.counters()["fallbacks"]
    for rows in (3, 5, 0, 9):
        x = torch.randn(rows, 24, device="cuda", requires_grad=True)
        assert_near(step(compiled, model, x), step(model, model, x), NEAR[torch.float32])
    assert torch_ort.counters()["fallbacks"] == before


LAYOUTS = {
    "transposed": lambda x: x.mT,
    "every other": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "channels last": lambda x: x[None].to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("road", roads.ROADS)
def test_layouts(road: str, layout: str) -> None:
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(4, 6, 8, device="cuda")).requires_grad_()
    model = Norm(tuple(x.shape[-1:])).cuda()
    before = torch_ort.counters()["fallbacks"]
    got, want = (step(run, model, x) for run in (roads.ROADS[road](model), model))
    assert_near(got, want, NEAR[torch.float32])
    assert torch_ort.counters()["fallbacks"] == before


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("road", roads.ROADS)
def test_weight_of_another_dtype(road: str) -> None:
    torch.manual_seed(0)
    model = Norm((24,)).cuda()
    x = torch.randn(35, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    got, want = (step(run, model, x) for run in (roads.ROADS[road](model), model))
    assert_near(got, want, NEAR[torch.bfloat16])


@pytest.mark.parametrize("road", roads.ROADS)
def test_autocast(road: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), Norm((24,)), nn.Linear(24, 8)).cuda()
    x = torch.randn(35, 16, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        got, want = (step(run, model, x) for run in (roads.ROADS[road](model), model))
    assert_near(got, want, NEAR[torch.bfloat16])


def test_numbers_that_are_not_finite() -> None:
    model = Norm((4,)).cuda()
    x = torch.tensor([[1.0, torch.nan, 2, 3], [0, 0, 0, 0], [1e30, 1, 1, 1]], device="cuda")
    norm = torch.compile(lambda x: F.rms_norm(x, (4,), model.norm.weight), backend="ort")
    with torch.no_grad():
        torch.testing.assert_close(norm(x), model.norm(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_gradients_are_those_of_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Norm((24,), 1e-6).to("cuda", dtype)
    x = torch.randn(35, 24).to("cuda", dtype).requires_grad_()
    wide = Norm((24,), 1e-6).double()
    wide.load_state_dict(model.state_dict())

    def twice(run: Callable, x: torch.Tensor) -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [each.detach().double().cpu() for each in (first, second)]

    before = torch_ort.counters()
    got = twice(torch.compile(model, backend="ort"), x)
    assert torch_ort.counters()["fallbacks"] == before["fallbacks"]
    exact = twice(wide, x.detach().double().cpu().requires_grad_())
    assert_near(got, exact, NEAR[dtype])


RULED = {
    "rows": ((2, 3, 4), [4], torch.float32),
    "two dims": ((2, 3, 4), [3, 4], torch.float32),
    "short floats": ((2, 3, 4), [4], torch.bfloat16),
    "doubles": ((2, 3, 4), [4], torch.float64),
    "empty": ((0, 4), [4], torch.float16),
}


@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]], ids=str)
@pytest.mark.parametrize("case", RULED)
def test_rules_tell_what_the_operators_give(case: str, mask: list[bool]) -> None:
    sizes, normalized, dtype = RULED[case]
    x = torch.randn(sizes).to("cuda", dtype)
    weight = torch.ones(normalized, dtype=dtype, device="cuda")
    forward = (x, normalized, weight, None)
    result, rstd = assert_ruled(torch.ops.aten._fused_rms_norm.default, forward)
    backward = (result, x, normalized, rstd, weight, mask)
    assert_ruled(torch.ops.aten._fused_rms_norm_backward.default, backward)


def assert_ruled(func: Any, args: tuple) -> list[torch.Tensor | None]:
    real = func(*args)
    told = shape_rules.find(func)(*pytree.tree_map_only(torch.Tensor, spec_of, args))
    for spec, tensor in zip(told, real, strict=True):
        assert (spec is None) == (tensor is None)
        if tensor is not None:
            assert (list(spec.sizes), spec.dtype) == (list(tensor.shape), tensor.dtype)
            assert list(spec.strides) == list(tensor.stride()) or tensor.numel() == 0
    return real
