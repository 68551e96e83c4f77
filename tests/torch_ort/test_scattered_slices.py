"""Assignments to parts of tensors, in loops and alone, and gradients of parts that are read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from comparison import assert_as_exact_as_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_ort

pytestmark = pytest.mark.ort_only
WIDTH = 8


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.compiler.reset()


class Steps(nn.Module):
    """A loop over the times of a sequence (batch, time, WIDTH)."""

    def __init__(self, run: Callable[[Steps, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.run = nn.Linear(WIDTH, WIDTH), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def filled(self: Steps, x: Tensor) -> Tensor:
    result = x.new_zeros(x.shape)
    for time in range(x.shape[1]):
        result[:, time] = self.mix(x[:, time]).tanh()
    return result


def filled_backward(self: Steps, x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    for time in reversed(range(x.shape[1])):
        result[:, time] = self.mix(x[:, time]).tanh()
    return result * 2


def half_filled(self: Steps, x: Tensor) -> Tensor:
    result = torch.ones_like(x)
    for time in range(0, x.shape[1], 2):
        result[:, time] = self.mix(x[:, time]).tanh()
    return result


def recurrent(self: Steps, x: Tensor) -> Tensor:
    result, state = torch.zeros_like(x), x.new_zeros(x.shape[0], WIDTH)
    for time in range(x.shape[1]):
        state = torch.tanh(x[:, time] + self.mix(state))
        result[:, time] = state
    return result


def recurrent_over_its_result(self: Steps, x: Tensor) -> Tensor:
    result = x.clone()
    for time in range(1, x.shape[1]):
        result[:, time] = result[:, time] + 0.9 * result[:, time - 1]
    return self.mix(result)


def added_in_place(self: Steps, x: Tensor) -> Tensor:
    result = x.clone()
    for time in range(1, x.shape[1]):
        result[:, time] += 0.5 * result[:, time - 1]
    return self.mix(result)


def listed(self: Steps, x: Tensor) -> Tensor:
    return torch.stack([self.mix(x[:, time]).tanh() for time in range(x.shape[1])], 1)


def windows(self: Steps, x: Tensor) -> Tensor:
    """Each time is in three windows, whose gradients overlap."""
    padded = F.pad(self.mix(x), (0, 0, 1, 1))
    sums = [padded[:, time : time + 3].sum(1) for time in range(x.shape[1])]
    return torch.stack(sums, 1).tanh()


LOOPS = (
    filled, filled_backward, half_filled, recurrent, recurrent_over_its_result, added_in_place,
    listed, windows,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop: Callable[[Steps, Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Steps(loop).to(dtype)
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    x = torch.randn(3, 12, WIDTH).to(dtype)
    assert_as_exact_as_eager(model, compiled, x)
    assert torch_ort.counters()["fallbacks"] == 0


def bytes_written(loop: Callable[[Steps, Tensor], Tensor], length: int) -> int:
    """Count the bytes that the kernels of a training step write."""
    model = Steps(loop)
    x = torch.randn(3, length, WIDTH, requires_grad=True)
    report = torch_ort.profile(model, x, steps=1)
    return sum(step.written_bytes for step in report.steps)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_time_grows_with_the_length(loop: Callable[[Steps, Tensor], Tensor]) -> None:
    """Nothing of the size of the whole sequence is written for each time."""
    short, long = bytes_written(loop, 16), bytes_written(loop, 64)
    assert long < 6 * short


def circular(x: Tensor) -> Tensor:
    return F.pad(x.tanh(), (1, 2, 2, 1), mode="circular").square()


def circular_signal(x: Tensor) -> Tensor:
    return F.pad(x.flatten(2).tanh(), (2, 2), mode="circular").square()


def interleaved(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    result[..., 0::2], result[..., 1::2] = x[..., 1::2].sin(), x[..., 0::2].cos()
    return result


def two_halves(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    result = x.new_empty(batch, channels, 2 * height, width)
    result[:, :, :height], result[:, :, height:] = x.sin(), x.cos()
    return result


def shifted_over_itself(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :, 1:] = y[:, :, :-1].clone()
    return y * 2


def boxes(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3, 2, 1::2] = 0
    y[0, :, 1:3] *= 2
    y[..., -1] += y[..., 0]
    return y


def channels_swapped(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0], y[:, 1] = x[:, 1], x[:, 0]
    return y.relu()


def numbers_of_another_dtype(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = torch.arange(x.shape[-1])
    y[:, 1] = x[:, 1].double().exp()
    return y


def replaced_by_more(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1] = x[:, 0]
    y[:, 1, 2] = x[:, 2, 1]
    y[:, 0:3] = x[:, 1:4] + 1
    return y


def repeated_elements(x: Tensor) -> Tensor:
    repeated = x[:, :1].expand(-1, 4, -1, -1)
    return torch.slice_scatter(repeated, x[:, :2] * 2, 1, 1, 3) + repeated


def replaced_twice(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 0]
    first = y[:, 0].exp()
    y[:, 0] = x[:, 1]
    return y + first[:, None]


def whole_replaced(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:] = x.exp()
    return y


def parts_are_returned(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    first = y[:, 0] + 1
    y[:, 0] = y[:, 1]
    return y, first, y[:, 1] * 2, y[:, :2].clone()


def a_view_is_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    y[:, 0] = 1
    return y, y[:, 1:]


def input_is_changed(x: Tensor) -> Tensor:
    y = x * 1
    z = y.detach()
    z[:, 0] = 3
    return y.sin()


ASSIGNMENTS = (
    circular, circular_signal, interleaved, two_halves, shifted_over_itself, boxes,
    channels_swapped, numbers_of_another_dtype, replaced_by_more, replaced_twice, whole_replaced,
    repeated_elements, parts_are_returned, a_view_is_returned, input_is_changed,
)  # fmt: skip


def results_of(call: Callable, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    results = call(x)
    results = list(results) if isinstance(results, tuple) else [results]
    loss = sum((result.square() * 0.5).sum() + result.sum() for result in results)
    loss.backward()
    return [*results, x.grad]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("call", ASSIGNMENTS, ids=lambda call: call.__name__)
def test_assignments(call: Callable, layout: torch.memory_format, dynamic: bool) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(call, backend="ort", dynamic=dynamic)
    for sizes in [(2, 4, 6, 8), (3, 4, 5, 4)]:
        x = torch.randn(sizes).to(memory_format=layout)
        got, want = results_of(compiled, x), results_of(call, x)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert [y.stride() for y in got] == [y.stride() for y in want]
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("call", ASSIGNMENTS[:8], ids=lambda call: call.__name__)
def test_assignments_between_convolutions(call: Callable) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), Call(call), nn.Conv2d(4, 4, 3, padding=1))
    if call is circular_signal:
        model[2] = nn.Conv1d(4, 4, 3)
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    assert_as_exact_as_eager(model, compiled, torch.randn(2, 4, 8, 10))
    assert torch_ort.counters()["fallbacks"] == 0


class Call(nn.Module):
    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def test_without_gradients_and_two_calls_alive() -> None:
    model = Steps(added_in_place)
    compiled = torch.compile(model, backend="ort")
    x, y = torch.randn(2, 3, 5, WIDTH).unbind()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    a, b = compiled(x.requires_grad_()), compiled(y.requires_grad_())
    (b.square().sum() + a.sin().sum()).backward()
    got = x.grad, y.grad
    x.grad = y.grad = None
    (model(y).square().sum() + model(x).sin().sum()).backward()
    torch.testing.assert_close(got, (x.grad, y.grad))


def part_of_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.new_zeros(3, 8)
    y[:, 2:6] = x
    return (y[:, 2:6] * w,)


def part_of_result(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, y = x + 1, x.new_zeros(3, 8)
    y[:, 2:6] = a
    return y[:, 2:6] * w, a.detach()


def copy_of_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_like(x)
    y.copy_(x)
    return (y[:, 1:] * w[:, 1:],)


@pytest.mark.parametrize(
    "call", [part_of_input, part_of_result, copy_of_input], ids=lambda call: call.__name__
)
def test_what_the_caller_changes_before_backward(call: Callable) -> None:
    gradients = []
    for each in (torch.compile(call, backend="ort"), call):
        torch.manual_seed(0)
        x, w = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
        result, *given_out = each(x, w)
        for changed in (x, *given_out):
            changed.data.add_(100)
        result.sum().backward()
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients)


def test_parts_without_elements() -> None:
    def call(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        z[:, 0:0:3] = y
        z[:, 6:] += 1
        return z + z[:, 4:4:2].sum()

    compiled = torch.compile(call, backend="ort", dynamic=False)
    x, y = torch.randn(3, 6, requires_grad=True), torch.randn(3, 0, requires_grad=True)
    torch.testing.assert_close(compiled(x, y), call(x, y))
    compiled(x, y).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 6), 2.0))


# ---- random programs

SIZES = (3, 4, 6)


@dataclass(frozen=True)
class Cut:
    """Index one dim, or a range of it with a step; the range is never empty."""

    dim: int
    start: int
    stop: int | None  # None: one index, and the dim is dropped
    step: int = 1

    def of(self, x: Tensor) -> Tensor:
        index: list = [slice(None)] * x.dim()
        whole = self.stop is not None
        index[self.dim] = slice(self.start, self.stop, self.step) if whole else self.start
        return x[tuple(index)]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    dim = draw(st.integers(0, 2))
    start = draw(st.integers(0, SIZES[dim] - 1))
    from_end = draw(st.booleans())
    if draw(st.booleans()):
        return Cut(dim, start - SIZES[dim] if from_end else start, None)
    stop = draw(st.integers(start + 1, SIZES[dim]))
    return Cut(dim, start, stop, draw(st.integers(1, 3)))


KINDS = ("read", "write", "add", "fill", "copy", "nested", "mix", "whole")


@st.composite
def programs(draw: st.DrawFn) -> list[tuple]:
    return [
        (draw(st.sampled_from(KINDS)), draw(cuts()), draw(cuts()), draw(st.integers(0, 3)))
        for _ in range(draw(st.integers(1, 10)))
    ]


def fitting(x: Tensor, like: Tensor) -> Tensor:
    """Give numbers of x in the shape of `like`."""
    flat = x.reshape(-1)
    return flat.repeat(like.numel() // flat.numel() + 1)[: like.numel()].view(like.shape)


def run_program(program: list[tuple], x: Tensor) -> list[Tensor]:
    tensors = [x.clone(), torch.zeros_like(x), x.new_empty(SIZES).fill_(0.5), x * 2]
    results = []
    for kind, cut, other, which in program:
        target, source = tensors[which], tensors[(which + 1) % 4]
        part = cut.of(target)
        if kind == "read":
            results.append(part * 0.5)
        elif kind == "write":
            part.copy_(fitting(cut.of(source) * 2, part))
        elif kind == "add":
            part += fitting(other.of(source), part) * 0.5
        elif kind == "fill":
            part.fill_(0.25)
        elif kind == "copy":
            part.copy_(fitting(other.of(target).clone(), part))
        elif kind == "nested":
            inner = part[..., : max(1, part.shape[-1] // 2)]
            inner.copy_(fitting(other.of(source), inner))
        elif kind == "mix":
            tensors[which] = target + source.detach() * 0.5
        else:
            target[:] = source * 3
    return [*results, *tensors]


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_assignments(program: list[tuple], dtype: torch.dtype) -> None:
    torch.compiler.reset()
    x = torch.linspace(-1, 1, 72, dtype=torch.float64).view(SIZES).to(dtype)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_program(program, x))

    got, want = (results_of(each, x) for each in (torch.compile(call, backend="ort"), call))
    if dtype is torch.bfloat16:  # sums of rounded numbers: no farther from exact ones than eager's
        for ours, theirs, exact in zip(got, want, results_of(call, x.double()), strict=True):
            rounded = 2**-7 * max(1.0, exact.abs().max().item())
            error, of_eager = ((each.double() - exact).abs().max() for each in (ours, theirs))
            assert error <= 2 * of_eager + rounded
    else:
        near = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(got, want, rtol=near, atol=near)
    assert torch_ort.counters()["fallbacks"] == 0
