"""Communication between ranks as steps: what is in flight is neither read nor overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from late_group import FACTOR, NAME, LateGroup, late_group
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


def start(op: str, *args: object) -> Tensor:
    return getattr(torch.ops._c10d_functional, op)(*args, NAME)


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


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
