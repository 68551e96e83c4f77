"""`memory_budget` in graphs that communicate: gathers are repeated, sums over ranks are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from late_group import LateGroup, exchange, late_group, start, wait
from torch import Tensor, nn

import torch_ort

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.hands_over("Dynamo has autograd.Functions as operators that take graphs"),
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

WIDTH, DEPTH = 64, 4


@pytest.fixture
def group(device: str) -> Iterator[LateGroup]:
    """Give the group, whose tensors lie on a device."""
    with late_group() as found, torch.device(device):
        yield found


def gather(x: Tensor) -> Tensor:
    return wait(start("all_gather_into_tensor", x, 2))


def scatter(x: Tensor) -> Tensor:
    return wait(start("reduce_scatter_tensor", x, "sum", 2))


def total(x: Tensor) -> Tensor:
    return wait(start("all_reduce", x, "sum"))


Gathered, Scattered = exchange(gather, scatter), exchange(scatter, gather)
Summed = exchange(total, total)


class SplitWeight(nn.Module):
    """Has a part of its weight, as a layer of sharded parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ Gathered.apply(self.weight))


class SplitSequence(nn.Module):
    """Has a part of the rows between its layers, as a layer with sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Scattered.apply(self.up(Gathered.apply(x))))


class SummedRows(nn.Module):
    """Sums its result over the ranks, as a layer with split columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(Summed.apply(self.down(torch.tanh(self.up(x)))))


def network(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(DEPTH)))


class SplitFeed(nn.Module):
    """Two products on rows that are gathered and scattered, either of which could be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Scattered.apply(self.down(nn.functional.gelu(self.up(Gathered.apply(x)))))


def repeats_gathers(report: torch_ort.Report) -> bool:
    return any(name.startswith("all_gather") for name in repeated_in(report))


def repeated_in(report: torch_ort.Report) -> list[str]:
    (graph,) = report.graphs
    return [name for name, *_ in graph.recomputation.planned.made]


@pytest.mark.parametrize(
    ("kind", "rows", "fraction"), [(SplitWeight, 4, 0.4), (SplitSequence, 16, 0.7)]
)
def test_gathers_are_repeated(
    kind: type[nn.Module], rows: int, fraction: float, group: LateGroup
) -> None:
    net, x = network(kind), torch.randn(rows, WIDTH)
    want = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    starts = {}
    for amount in (0, fraction):
        torch._dynamo.reset()
        options = {"memory_budget": amount, "disable": ("bucket_collectives",)}
        call = torch.compile(net, backend="ort", fullgraph=True, options=options)
        for _ in range(2):
            group.log.clear()
            got = torch.autograd.grad(call(x).square().sum(), list(net.parameters()))
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs)
        starts[amount] = group.log.count("start")
    assert starts[fraction] > starts[0]
    assert torch_ort.counters()["fallbacks"] == 0


def test_the_report_names_gathers(group: LateGroup) -> None:
    net, x = network(SplitWeight), torch.randn(4, WIDTH)
    report = torch_ort.explain(net, x, options={"memory_budget": 0.4})
    assert repeats_gathers(report), report
    assert "recomputed: 2 nodes, so that 32.0 KiB less are saved" in str(report)


def test_sums_are_not_repeated(group: LateGroup) -> None:
    net, x = network(SummedRows), torch.randn(16, WIDTH)
    want = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    options = {"memory_budget": 0.8}
    call = torch.compile(net, backend="ort", fullgraph=True, options=options)
    got = torch.autograd.grad(call(x).square().sum(), list(net.parameters()))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    report = torch_ort.explain(net, x, options=options)
    assert repeated_in(report)
    assert not any(name.startswith(("all_reduce", "wait")) for name in repeated_in(report))


def test_given_speeds_decide_what_is_repeated(group: LateGroup) -> None:
    """A gather that takes no time is repeated before a product is, and a slow one is not."""
    net, x = network(SplitFeed), torch.randn(16384, WIDTH)
    found = {}
    for micros in (1, 10**6):
        options = {
            "memory_budget": 0.8,
            "collective_latency_us": micros,
            "collective_bytes_per_second": 10**15,
        }
        report = torch_ort.explain(net, x, options=options)
        found[micros] = repeats_gathers(report)
    assert found == {1: True, 10**6: False}


def test_ranks_that_differ_repeat_none(group: LateGroup) -> None:
    """Without gather_again, as ranks agree if their gathers differ, a budget repeats none."""
    net, x = network(SplitWeight), torch.randn(4, WIDTH)
    options = {"memory_budget": 0.4, "disable": ("gather_again",), "strict": True}
    with pytest.raises(Exception, match="memory_budget: too small for this graph"):
        torch.compile(net, backend="ort", fullgraph=True, options=options)(x)
