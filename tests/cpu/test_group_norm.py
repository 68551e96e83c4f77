"""Group norm of short floats in fused regions, against eager PyTorch in float64.

Only where channels stand last: elsewhere PyTorch's kernels are as fast.
"""

from __future__ import annotations

import copy

import pytest
import torch
from regions import ISAS
from torch import nn

import torch_ort

pytestmark = pytest.mark.ort_only

PLAIN, LAST = torch.contiguous_format, torch.channels_last


class Layer(nn.Module):
    """A norm between what regions join it with."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.norm(x * 1.5))


def make_norm(groups: int, channels: int, **settings) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, channels, **settings)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def train(
    call,
    model: nn.Module,
    shape: tuple[int, ...],
    short: torch.dtype,
    offset: float = 0,
    layout=LAST,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Run two steps; give results, gradients of inputs and of parameters."""
    dtype = dtype or short
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(2):
        x = torch.randn(shape, generator=generator, dtype=torch.float64).add(offset)
        # The exact model sees the numbers that the other one sees.
        x = x.to(short).to(dtype).to(memory_format=layout).requires_grad_()
        model.zero_grad()
        result = call(x)
        assert result.is_contiguous(memory_format=layout)
        tangent = torch.randn(shape, generator=generator, dtype=torch.float64).to(short).to(dtype)
        result.backward(tangent.to(memory_format=layout))
        found += [result.detach(), x.grad, *(p.grad for p in model.parameters())]
    return found


# Statistics and sums are taken in float32, so that results are as far off as a few roundings.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
SHORT = list(TOLERANCE)


def check(
    model: nn.Module, shape: tuple[int, ...], dtype=torch.bfloat16, offset: float = 0, layout=LAST
) -> None:
    model = model.to(dtype)
    exact = copy.deepcopy(model).double()
    want = train(exact, exact, shape, dtype, offset, layout, torch.float64)
    got = train(torch.compile(model, backend="ort"), model, shape, dtype, offset, layout)
    for mine, double in zip(got, want, strict=True):
        assert mine.dtype == dtype
        off = TOLERANCE[dtype] * max(double.abs().max().item(), 1)
        torch.testing.assert_close(mine.double(), double, rtol=0, atol=off)


def operators(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    (graph,) = torch_ort.explain(model, x).graphs
    return graph.aten


IMAGES = [
    (2, (4, 6, 8, 8)), (1, (1, 4, 3, 2)), (5, (3, 40, 4, 4)), (5, (17, 5, 5, 1)),
    (7, (33, 70, 3, 2)), (4, (2, 16, 33, 31)), (2, (3, 64, 8, 8)), (8, (40, 8, 65, 2)),
    (2, (2, 2080, 3, 3)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize(("groups", "shape"), IMAGES, ids=str)
def test_training_against_eager(groups, shape, dtype):
    check(Layer(make_norm(groups, shape[1])), shape, dtype)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize(
    ("groups", "shape"), [(2, (2, 4, 4, 4, 2)), (5, (3, 40, 3, 5, 6)), (1, (1, 6, 2, 33, 7))]
)
def test_volumes(groups, shape, dtype):
    layout = torch.channels_last_3d
    model = Layer(make_norm(groups, shape[1]))
    check(model, shape, dtype, layout=layout)
    x = torch.randn(shape).to(dtype).to(memory_format=layout).requires_grad_()
    assert not any("group_norm" in name for name in operators(model, x))


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(monkeypatch, isa):
    monkeypatch.setenv("TORCH_ORT_ISA", isa)
    check(Layer(make_norm(3, 21)), (5, 21, 6, 7))


@pytest.mark.parametrize("settings", [{"affine": False}, {"eps": 0.5}, {"bias": False}], ids=str)
def test_settings(settings):
    norm = make_norm(2, 4, **{name: settings[name] for name in settings if name != "bias"})
    if "bias" in settings:
        norm.bias = None
    check(Layer(norm), (4, 4, 5, 5))


def test_a_large_mean_does_not_drown_the_variance():
    # With numbers that float16 still tells apart.
    check(make_norm(2, 4), (4, 4, 16, 16), torch.float16, offset=1e3)


def test_parameters_in_float32():
    norm = make_norm(2, 4)
    exact = copy.deepcopy(norm).double()
    x = torch.randn(3, 4, 8, 8).bfloat16().to(memory_format=LAST).requires_grad_()
    double = x.detach().double().requires_grad_()
    torch.compile(norm, backend="ort")(x).float().pow(2).sum().backward()
    exact(double).pow(2).sum().backward()
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=0, atol=0.1)
    for mine, want in zip(norm.parameters(), exact.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad.double(), want.grad, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("odd", [0, 7], ids=["the first row", "another row"])
def test_pixels_far_from_the_others(odd):
    # The first rows of pixels stand for all where distances are taken from.
    x = torch.randn(2, 4, 32, 8, dtype=torch.float64)
    x[:, :, odd] += 1e3
    x = x.half()
    norm = make_norm(2, 4, affine=False)
    got = torch.compile(norm, backend="ort")(x.to(memory_format=LAST))
    torch.testing.assert_close(got.double(), norm(x.double()), rtol=0, atol=4e-3)


def test_channels_that_differ_much():
    # The variance of a group is that of its channels and of their means.
    x = torch.randn(3, 6, 8, 8, dtype=torch.float64)
    x += torch.tensor([0, 1e3, -1e3, 5, 0, 1e-3], dtype=torch.float64)[:, None, None]
    x = x.half()
    norm = make_norm(2, 6).half()
    got = torch.compile(norm, backend="ort")(x.to(memory_format=LAST))
    want = copy.deepcopy(norm).double()(x.double())
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-3)


def test_groups_that_do_not_vary():
    model = Layer(make_norm(2, 4)).bfloat16()
    x = torch.full((2, 4, 4, 4), 7.0).bfloat16().to(memory_format=LAST)
    got = torch.compile(model, backend="ort")(x)
    want = copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-2)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_what_is_no_number_stays_in_its_group(odd):
    norm = make_norm(2, 4).bfloat16()
    x = torch.randn(3, 4, 5, 5).bfloat16()
    x[1, 2, 3, 4] = odd
    x = x.to(memory_format=LAST)
    got = torch.compile(norm, backend="ort")(x)
    assert got.isnan().sum() == 2 * 5 * 5
    torch.testing.assert_close(got, norm(x), equal_nan=True)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_parameter_without_a_gradient(frozen):
    norm = make_norm(2, 4).bfloat16()
    exact = copy.deepcopy(norm).double()
    for each in (norm, exact):
        getattr(each, frozen).requires_grad_(False)
    # Of an input without a gradient, eager PyTorch crashes where channels stand last.
    x = torch.randn(2, 4, 5, 5).bfloat16().to(memory_format=LAST).requires_grad_()
    torch.compile(norm, backend="ort")(x).sum().backward()
    exact(x.double()).sum().backward()
    for mine, double in zip(norm.parameters(), exact.parameters(), strict=True):
        assert (mine.grad is None) == (double.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.double(), double.grad, rtol=1e-2, atol=1e-1)


def test_two_calls_are_alive():
    model = Layer(make_norm(2, 4)).bfloat16()
    call = torch.compile(model, backend="ort")
    inputs = [
        torch.randn(2, 4, 6, 6).bfloat16().to(memory_format=LAST).requires_grad_() for _ in range(2)
    ]
    results = [call(x) for x in inputs]
    sum(result.float().sum() for result in results).backward()
    exact = copy.deepcopy(model).double()
    for x in inputs:
        again = x.detach().double().requires_grad_()
        exact(again).sum().backward()
        torch.testing.assert_close(x.grad.double(), again.grad, rtol=0, atol=3e-2)


def test_an_empty_batch():
    model = Layer(make_norm(2, 4)).bfloat16()
    x = torch.zeros(0, 4, 5, 5).bfloat16().to(memory_format=LAST).requires_grad_()
    torch.compile(model, backend="ort")(x).sum().backward()
    assert x.grad.shape == x.shape
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("settings", [{}, {"affine": False}], ids=str)
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_nothing_is_left_to_pytorch(dtype, settings):
    x = torch.randn(2, 4, 8, 8).to(dtype).to(memory_format=LAST).requires_grad_()
    model = Layer(make_norm(2, 4, **settings)).to(dtype)
    assert not any("group_norm" in name for name in operators(model, x))


def test_convolutions_of_short_floats_have_channels_last():
    block = [nn.Conv2d(16, 16, 3), make_norm(2, 16), nn.SiLU()]
    model = nn.Sequential(*copy.deepcopy(block * 3), nn.Conv2d(16, 4, 3), nn.AdaptiveAvgPool2d(1))
    x = torch.randn(4, 16, 32, 32).bfloat16()
    assert not any("group_norm" in name for name in operators(model.bfloat16(), x))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(8, 4).bfloat16(),
        torch.randn(2, 4, 4, 4).bfloat16(),
        torch.randn(2, 4, 4, 4).to(memory_format=LAST),
    ],
    ids=["one number a channel", "plain images", "float32"],
)
def test_what_stays_with_pytorch(x):
    model = Layer(make_norm(2, 4)).to(x.dtype)
    assert any("group_norm" in name for name in operators(model, x.requires_grad_()))


def test_any_number_of_threads_gives_the_same_bits():
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            model = Layer(make_norm(4, 16)).bfloat16()
            call = torch.compile(model, backend="ort")
            results.append(train(call, model, (5, 16, 24, 24), torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.hands_over
def test_many_sizes():
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), Layer(make_norm(2, 4))).bfloat16()
    exact = copy.deepcopy(model).double()
    call = torch.compile(model, backend="ort", dynamic=True)
    for shape in [(4, 4, 8, 8), (3, 4, 3, 2), (17, 4, 5, 3), (33, 4, 3, 4), (2, 4, 40, 5)]:
        want = train(exact, exact, shape, torch.bfloat16, dtype=torch.float64)
        got = train(call, model, shape, torch.bfloat16)
        for mine, double in zip(got, want, strict=True):
            off = 2**-5 * max(double.abs().max().item(), 1)
            torch.testing.assert_close(mine.double(), double, rtol=0, atol=off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(5, 4), (5, 4, 3), (2, 4, 3, 3)], ids=str)
def test_short_floats_with_parameters_in_float32(size, dtype, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    norm, x = nn.GroupNorm(2, 4), torch.randn(size).to(dtype)
    found = []
    for call in (torch.compile(copy.deepcopy(norm), backend="ort"), norm):
        leaf = x.clone().requires_grad_()
        result = call(leaf)
        result.float().square().sum().backward()
        found.append([result, leaf.grad, *(p.grad for p in call.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
