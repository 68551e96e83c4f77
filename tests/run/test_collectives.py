"""Communication between ranks as steps: what is in flight is neither read nor overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from late_group import FACTOR, LateGroup, exchange, late_group, start, wait
from torch import Tensor, nn

import torch_ort

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


@pytest.fixture
def group(device: str) -> Iterator[LateGroup]:
    """Give the group, whose tensors lie on a device."""
    with late_group() as found, torch.device(device):
        yield found


def work(x: Tensor) -> Tensor:
    """Compute beside what is in flight, in memory that could be that of an operand."""
    for _ in range(3):
        x = torch.tanh(x @ x / 8) + 0.1
    return x


COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": lambda x: wait(start("all_reduce", x, "sum")),
    "all_gather": lambda x: wait(start("all_gather_into_tensor", x, 2)),
    "reduce_scatter": lambda x: wait(start("reduce_scatter_tensor", x, "sum", 2)),
    "broadcast": lambda x: wait(start("broadcast", x, 0)),
    "all_to_all": lambda x: wait(start("all_to_all_single", x, [16, 16], [16, 16])),
    "all_reduce_coalesced": lambda x: sum(
        wait(each) for each in start("all_reduce_coalesced", [x, x + 1], "sum")
    ),
    "all_gather_coalesced": lambda x: sum(
        wait(each) for each in start("all_gather_into_tensor_coalesced", [x, x + 1], 2)
    ),
    "reduce_scatter_coalesced": lambda x: sum(
        wait(each) for each in start("reduce_scatter_tensor_coalesced", [x, x + 1], "sum", 2)
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_operands_and_results_in_flight(name: str, group: LateGroup) -> None:
    def function(x: Tensor, other: Tensor) -> Tensor:
        # The operand is in the engine's memory, and nothing else reads it.
        gathered = COLLECTIVES[name](torch.sigmoid(x) * 2)
        return gathered.sum() + work(other).sum()

    call = torch.compile(function, backend="ort", fullgraph=True)
    for _ in range(3):  # in memory of calls before
        x, other = torch.randn(32, 32), torch.randn(32, 32)
        torch.testing.assert_close(call(x, other), function(x, other))
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["collectives"] == 3


def test_work_runs_between(group: LateGroup) -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(len(group.log))
        return x * 1

    torch.library.define("late::note", "(Tensor x) -> Tensor", lib=_LIBRARY)
    torch.library.impl("late::note", "CompositeExplicitAutograd", note, lib=_LIBRARY)
    torch.library.register_fake("late::note", lambda x: torch.empty_like(x), lib=_LIBRARY)

    def function(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        other = other @ other
        y = COLLECTIVES["all_gather"](x * 2)
        z = torch.ops.late.note(other @ other)
        return y.exp(), z

    call = torch.compile(function, backend="ort", fullgraph=True)
    call(torch.randn(4, 4), torch.randn(64, 64))
    assert group.log == ["start", "wait"]
    assert seen == [1]


_LIBRARY = torch.library.Library("late", "FRAGMENT")


class Layer(nn.Module):
    """Gathers its weight, and scatters the sum of its gradients."""

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return COLLECTIVES["all_gather"](x)

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return COLLECTIVES["reduce_scatter"](gradient)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.Gathered.apply(self.weight))


@pytest.mark.hands_over("Dynamo has autograd.Functions as operators that take graphs")
@pytest.mark.parametrize(
    ("disable", "of_each_step"),
    [((), 2), (("bucket_collectives",), 8), (("bucket_collectives", "overlap_collectives"), 8)],
)
def test_training_with_gathered_weights(
    disable: tuple[str, ...], of_each_step: int, group: LateGroup
) -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(*(Layer() for _ in range(4))))
    call = torch.compile(nets[1], backend="ort", fullgraph=True, options={"disable": disable})
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for _ in range(4):
        x = torch.randn(64, 32)
        for run, optimizer in zip((nets[0], call), optimizers, strict=True):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
        for want, got in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
            torch.testing.assert_close(got, want)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["collectives"] == 4 * of_each_step


def test_results_that_are_read_themselves(group: LateGroup) -> None:
    def read_behind(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        flying = start("all_reduce", x * 2, "sum")
        wait(flying)
        second = start("all_gather_into_tensor", other, 2)
        return flying + 1, wait(second).exp(), work(other)

    def waited_twice(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        flying = start("all_reduce", x * 2, "sum")
        return wait(flying).exp(), wait(flying).tanh()

    def returned(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        flying = start("all_reduce", x * 2, "sum")
        return flying, wait(flying).exp()

    for function in (read_behind, waited_twice, returned):
        call = torch.compile(function, backend="ort", fullgraph=True)
        for _ in range(2):
            x, other = torch.randn(32, 32) / 8, torch.randn(32, 32)
            for got, want in zip(call(x, other), function(x, other), strict=True):
                torch.testing.assert_close(got, want)
    assert torch_ort.counters()["fallbacks"] == 0


def summed(x: Tensor) -> Tensor:
    return COLLECTIVES["all_reduce"](x)


def read_later(x: Tensor, other: Tensor) -> Tensor:
    y = x.sin()
    return summed(y) + work(other) + y


def read_before(x: Tensor, other: Tensor) -> Tensor:
    y = x.sin()
    return y.exp() + summed(y) + work(other)


def nobody_waits(x: Tensor, other: Tensor) -> Tensor:
    start("all_reduce", x * 2, "sum")
    return work(other)


def summed_in_two_ways(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return summed(y), summed(y + 1)


def returned(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return summed(y).exp(), y


def returned_with_a_view(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    y = summed(x.sin())
    return y, y.view(-1)


# By what is summed over the ranks, which the sum may overwrite or must not.
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]] = {
    "nothing else reads it": lambda x, other: summed(x * 2).exp() + work(other),
    "an input": lambda x, other: summed(x).exp() + work(other),
    "read later": read_later,
    "read before": read_before,
    "a view": lambda x, other: summed((x * 2).t()) + work(other),
    "a part": lambda x, other: summed((x * 2)[:16]).exp() + work(other)[:16],
    "allocated by its kernel": lambda x, other: summed(x.sort(1)[0]).exp() + work(other),
    "summed in two ways": summed_in_two_ways,
    "nobody waits": nobody_waits,
    "a sum itself": lambda x, other: summed(summed(x.sin()) + 1) + work(other),
    "returned": returned,
    "the sum is returned": lambda x, other: (summed(x.sin()), work(other)),
    "a view of the sum is returned": lambda x, other: summed(x.sin()).view(4, -1)[1:],
    "the sum and a view are returned": returned_with_a_view,
    "empty": lambda x, other: summed(x[:0] * 2),
    "gathered and viewed": lambda x, other: (
        COLLECTIVES["all_gather"](x.sin()).view(2, 32, 32).sum(0).exp() + work(other)
    ),
    "gathered and returned": lambda x, other: COLLECTIVES["all_gather"](x.sin()),
    "scattered and returned": lambda x, other: COLLECTIVES["reduce_scatter"](x.sin()),
}


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_results_in_planned_memory(
    name: str, checks: bool, group: LateGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checks:  # verifies plans, and spoils memory before it is written
        monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    function = SUMS[name]
    call = torch.compile(function, backend="ort", fullgraph=True)
    for _ in range(3):
        x, other = torch.randn(32, 32), torch.randn(32, 32) / 8
        kept = x.clone()
        got, want = call(x, other), function(x, other)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x, kept, rtol=0, atol=0)
    assert torch_ort.counters()["fallbacks"] == 0


class Averaged(nn.Module):
    """Sums the gradient of a weight over the ranks."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return summed(gradient)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.Summed.apply(self.weight))


@pytest.mark.hands_over("Dynamo has autograd.Functions as operators that take graphs")
def test_gradients_are_summed_where_they_are(group: LateGroup) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Averaged(64) for _ in range(3)))
    x = torch.randn(8, 64)
    want = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    # Joined collectives take a list, of which only one could be overwritten.
    options = {"disable": ("bucket_collectives",)}
    call = torch.compile(net, backend="ort", fullgraph=True, options=options)
    held = []
    for _ in range(3):  # gradients of calls before stay as they are
        held.append(torch.autograd.grad(call(x).sum(), list(net.parameters())))
    for got in held:
        torch.testing.assert_close(got, want)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    # No kernel has allocated a result, and none was copied.
    assert counters["steps_functional"] == 0


SummedBothWays = exchange(summed, summed)

# What backward reads of it, or the caller gets, or both.
FORWARD_SUMS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "nobody": lambda y: y + 1,
    "backward": lambda y: y.sin() * y,
    "backward, as a view": lambda y: y.view(4, -1).sin(),
    "the caller": lambda y: y,
    "the caller, as a view": lambda y: y.view(4, -1),
    "both": lambda y: (y, y.sin()),
    "both, the caller as a view": lambda y: (y.view(4, -1), y.sin()),
    "both, backward as a view": lambda y: (y, y.view(4, -1).sin()),
}


@pytest.mark.hands_over("Dynamo has autograd.Functions as operators that take graphs")
@pytest.mark.parametrize("name", FORWARD_SUMS)
def test_sums_of_the_forward_half(
    name: str, group: LateGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")

    def function(x: Tensor, w: Tensor) -> Tensor | tuple[Tensor, ...]:
        return FORWARD_SUMS[name](SummedBothWays.apply(x @ w))

    def differentiated(call: Callable, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        results = call(x, w)
        results = results if isinstance(results, tuple) else (results,)
        return *results, *torch.autograd.grad(sum(y.square().sum() for y in results), (x, w))

    call = torch.compile(function, backend="ort", fullgraph=True)
    got, want = [], []
    for _ in range(3):  # results of calls before stay as they are
        # Sines of large numbers would differ by what rounding makes of these.
        x, w = (scale * torch.randn(32, 32) for scale in (1, 1 / 32))
        x.requires_grad_(), w.requires_grad_()
        got.append(differentiated(call, x, w))
        want.append(differentiated(function, x, w))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch_ort.counters()["fallbacks"] == 0


def test_a_wait_for_nothing(group: LateGroup) -> None:
    def function(x: Tensor, other: Tensor) -> Tensor:
        waited = wait(x * 2)
        return work(other) + waited

    call = torch.compile(function, backend="ort", fullgraph=True)
    x, other = torch.randn(32, 32), torch.randn(32, 32)
    torch.testing.assert_close(call(x, other), function(x, other))


def test_the_caller_waits(group: LateGroup) -> None:
    def function(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return start("all_gather_into_tensor", torch.sigmoid(x) * 2, 2), work(other)

    call = torch.compile(function, backend="ort", fullgraph=True)
    other = torch.randn(32, 32)
    inputs = [torch.randn(32, 32) for _ in range(3)]
    flying = [call(x, other)[0] for x in inputs]
    for x, each in zip(inputs, flying, strict=True):
        torch.testing.assert_close(wait(each), wait(function(x, other)[0]))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.hands_over("Dynamo has autograd.Functions as operators that take graphs")
def test_two_calls_are_in_flight_at_once(group: LateGroup) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer() for _ in range(2)))
    call = torch.compile(net, backend="ort", fullgraph=True)
    inputs = [torch.randn(8, 32, requires_grad=True) for _ in range(2)]
    want = torch.autograd.grad(sum(net(x).square().sum() for x in inputs), inputs)
    first, second = (call(x).square().sum() for x in inputs)
    got = [*torch.autograd.grad(second, inputs[1]), *torch.autograd.grad(first, inputs[0])]
    torch.testing.assert_close(got[::-1], list(want))


def test_an_error_of_communication_is_raised(group: LateGroup) -> None:
    def function(x: Tensor) -> Tensor:
        return COLLECTIVES["all_reduce"](x * 2).exp()

    call = torch.compile(function, backend="ort", fullgraph=True)
    x = torch.randn(4, 4)
    torch.testing.assert_close(call(x), (x * 2 * (1 + FACTOR)).exp())
    group.fails = True
    with pytest.raises(RuntimeError, match="the other rank has died"):
        call(x)
    group.fails = False
    torch.testing.assert_close(call(x), (x * 2 * (1 + FACTOR)).exp())


def test_what_is_in_flight_is_waited_for_when_a_step_fails(group: LateGroup) -> None:
    is_bad = False

    def check(x: Tensor) -> Tensor:
        if is_bad:
            raise ValueError("not this one")
        return x * 1

    torch.library.define("late::check", "(Tensor x) -> Tensor", lib=_LIBRARY)
    torch.library.impl("late::check", "CompositeExplicitAutograd", check, lib=_LIBRARY)
    torch.library.register_fake("late::check", lambda x: torch.empty_like(x), lib=_LIBRARY)

    def function(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        y = COLLECTIVES["all_gather"](x * 2)
        return y.exp(), torch.ops.late.check(other @ other)

    call = torch.compile(function, backend="ort", fullgraph=True)
    x, other = torch.randn(4, 4), torch.randn(64, 64)
    call(x, other)
    group.log.clear()
    is_bad = True
    with pytest.raises(ValueError, match="not this one"):
        call(x, other)
    assert group.log == ["start", "wait"]
