# Data parallel training of one process: buckets, collectives in the graph, distributed tensors.
from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_ort

pytestmark = [
    pytest.mark.both_roads,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_active_module() -> Iterator[None]:
    """Keep a failure local: torch forgets to leave a module whose forward raised."""
    yield
    nn.parallel.DistributedDataParallel._active_ddp_module = None


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def network(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return Network(width)


# Torch's first bucket has one megabyte, and no other may be smaller.
@pytest.mark.parametrize(("bucket_mb", "width"), [(25, 64), (1, 600)], ids=["one", "several"])
@pytest.mark.compile_only("refuses DistributedDataParallel inside")
def test_data_parallel_training(compiled, assert_engine_ran, bucket_mb, width):
    eager = network(width)
    ours = copy.deepcopy(eager)
    parallel = nn.parallel.DistributedDataParallel(ours, bucket_cap_mb=bucket_mb)
    call = compiled(parallel, fullgraph=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, ours)]
    for _ in range(3):
        x = torch.randn(4, 32)
        for optimizer, forward in zip(optimizers, (eager, call), strict=True):
            optimizer.zero_grad()
            forward(x).pow(2).mean().backward()
            optimizer.step()
    for want, got in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got, want)
    assert_engine_ran(backward=True)


def test_compiled_module_inside_data_parallel(compiled, assert_engine_ran):
    eager = network()
    ours = copy.deepcopy(eager)
    parallel = nn.parallel.DistributedDataParallel(compiled(ours))
    x = torch.randn(4, 32)
    eager(x).pow(2).sum().backward()
    parallel(x).pow(2).sum().backward()
    for want, got in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    assert_engine_ran(backward=True)


def test_collectives_in_the_graph(compiled, assert_engine_ran):
    from torch.distributed._functional_collectives import all_reduce

    def function(x):
        return all_reduce(x * 2, "sum", dist.group.WORLD).exp()

    x = torch.linspace(-1, 1, 6)
    torch.testing.assert_close(compiled(function)(x), (x * 2).exp())
    assert_engine_ran()


@pytest.mark.hands_over("the recorder takes no such inputs")
@pytest.mark.ort_only
@pytest.mark.compile_only("other words")
def test_distributed_tensors(compiled, assert_engine_ran):
    """Their device mesh is an input that is no tensor, and passes through the graph."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (1,))

    def function(x, w):
        return torch.tanh(x @ w)

    gradients = []
    for call in (function, compiled(function)):
        x = DTensor.from_local(torch.linspace(-1, 1, 12).reshape(3, 4), mesh, [Shard(0)])
        w = DTensor.from_local(torch.linspace(-1, 1, 8).reshape(4, 2), mesh, [Replicate()])
        x.requires_grad_()
        w.requires_grad_()
        output = call(x, w)
        assert output.device_mesh == mesh
        output.to_local().pow(2).sum().backward()
        assert x.grad.placements == x.placements
        gradients.append((x.grad.to_local(), w.grad.to_local()))
    torch.testing.assert_close(gradients[1], gradients[0])
    assert_engine_ran(backward=True)


@pytest.mark.hands_over("the recorder takes no such inputs")
@pytest.mark.ort_only
@pytest.mark.compile_only("other words")
def test_distributed_tensors_without_gradients(compiled, assert_engine_ran):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.linspace(-1, 1, 12).reshape(3, 4), mesh, [Shard(0)])
    with torch.no_grad():
        got = compiled(lambda x: (x * 2, x.sum(1)))(x)
    torch.testing.assert_close(got[0].to_local(), x.to_local() * 2)
    assert got[1].placements == (Shard(0),)
    assert_engine_ran()


@pytest.mark.hands_over("the recorder takes no such inputs")
@pytest.mark.ort_only
@pytest.mark.compile_only("other words")
def test_split_layers_of_all_sizes(assert_engine_ran):
    """Sizes of parts are the results of operations that give a size of the input back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (1,))
    layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    exact = copy.deepcopy(layers)
    parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    call = torch.compile(layers, backend="ort", dynamic=True, fullgraph=True)
    for length in (3, 5, 1, 9):
        x = torch.randn(2, length, 8)
        for net, run in ((exact, exact), (layers, call)):
            net.zero_grad()
            run(x).square().mean().backward()
        for want, got in zip(exact.parameters(), layers.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad)
    assert torch_ort.counters()["graphs_captured"] <= 2  # lengths of 1 have one of their own
    assert_engine_ran(backward=True)
