"""Products of compiled functions: who runs them, and what they give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import _C


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 9)).to(dtype)


def trained(call, model: nn.Module, sizes=(33, 33, 33)) -> list[torch.Tensor]:
    """Give losses and gradients of a few steps, and the parameters after them."""
    numbers = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for size in sizes:
        optimizer.zero_grad()
        x = torch.randn(size, 24, generator=numbers, dtype=torch.float64)
        loss = call(x.to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def compiled(model: nn.Module, **options) -> tuple[nn.Module, object]:
    torch.compiler.reset()
    ours = copy.deepcopy(model)
    return ours, torch.compile(ours, backend="ort", options={"strict": True, **options})


@pytest.mark.parametrize("isa", _C.isa_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_training_steps(dtype, isa):
    model = mlp(dtype)
    ours, call = compiled(model, isa=isa)
    got = trained(call, ours)
    # Two forward, the input's gradient of the second layer, and two of weights.
    assert torch_ort.counters()["steps_product"] == 3 * 5
    assert torch_ort.counters()["fallbacks"] == 0
    exact = copy.deepcopy(model).double()
    want = trained(exact, exact)
    near = 2e-6 if dtype == torch.float32 else 1e-13
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=10 * near, atol=near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_are_as_near_as_eager(dtype):
    model = mlp(dtype)
    ours, call = compiled(model)
    got = trained(call, ours)
    assert torch_ort.counters()["steps_product"] == 3 * 5
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    for a, b, c in zip(got, trained(eager, eager), trained(exact, exact), strict=True):
        off = (a.double() - c).abs().max()
        assert off <= 1.5 * (b.double() - c).abs().max() + torch.finfo(dtype).eps * c.abs().max()


@pytest.mark.parametrize("disable", ["products", "own_kernels"])
def test_switched_off(disable):
    model = nn.Linear(24, 40)
    ours, call = compiled(model, disable=disable, exact_random=True)
    got = trained(call, ours)
    assert torch_ort.counters()["steps_product"] == 0
    eager = copy.deepcopy(model)
    for a, b in zip(got, trained(eager, eager), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_own_kernels_stands_for_all_that_rounds_elsewhere():
    ours, call = compiled(mlp(), disable="own_kernels,reorder")
    got = trained(call, ours)
    assert torch_ort.counters()["steps_region"] == torch_ort.counters()["steps_product"] == 0
    eager = mlp()
    for a, b in zip(got, trained(eager, eager), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_number_of_threads_changes_no_bit():
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            ours, call = compiled(mlp())
            results.append(trained(call, ours, (301, 301)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_new_sizes_need_no_new_graph():
    sizes = (33, 5, 2, 70, 1, 33)  # PyTorch multiplies a single row of so few numbers
    model = mlp()
    ours, call = compiled(model)
    torch._dynamo.mark_dynamic(x := torch.randn(3, 24), 0)
    call(x).sum().backward()
    torch_ort.reset_counters()
    got = trained(call, ours, sizes)
    assert torch_ort.counters()["graphs_compiled"] <= 1  # of a single row, by Dynamo's rule
    exact = copy.deepcopy(model).double()
    for a, b in zip(got, trained(exact, exact, sizes), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "operands",
    [
        (torch.randn(4, 5), torch.randn(5)),
        (torch.randn(1, 5), torch.randn(6, 5).t()),  # short columns
        (torch.randn(4, 5), torch.randn(5, 1)),
        (torch.arange(20).view(4, 5), torch.arange(30).view(5, 6)),
        (torch.randn(4, 5, dtype=torch.complex64), torch.randn(5, 6, dtype=torch.complex64)),
    ],
    ids=["vector", "one row", "one column", "integers", "complex"],
)
def test_what_stays_with_pytorch(operands):
    torch.compiler.reset()
    call = torch.compile(torch.matmul, backend="ort", options={"strict": True})
    assert torch.equal(call(*operands), operands[0] @ operands[1])
    assert torch_ort.counters()["steps_product"] == 0


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, 1), (1, 0.5), (0, 1)])
def test_factors_beside_a_product(beta, alpha):
    start, a, b = torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)
    torch.compiler.reset()
    call = torch.compile(
        lambda *args: torch.addmm(*args, beta=beta, alpha=alpha), backend="ort",
        options={"strict": True},
    )  # fmt: skip
    want = torch.addmm(start.double(), a.double(), b.double(), beta=beta, alpha=alpha)
    torch.testing.assert_close(call(start, a, b).double(), want, rtol=1e-5, atol=1e-6)
    assert torch_ort.counters()["steps_product"] == (1 if (beta, alpha) == (1, 1) else 0)


@pytest.mark.parametrize("sizes", [(6,), (1, 6), (4, 1), (4, 6), (2, 1, 6), ()])
def test_what_sums_begin_with_broadcasts(sizes):
    torch.compiler.reset()
    start, a, b = torch.randn(sizes), torch.randn(2, 4, 5), torch.randn(2, 5, 6)
    call = torch.compile(torch.baddbmm, backend="ort", options={"strict": True})
    want = torch.baddbmm(start.double(), a.double(), b.double())
    torch.testing.assert_close(call(start, a, b).double(), want, rtol=1e-5, atol=1e-6)
    assert torch_ort.counters()["steps_product"] == 1


def test_batches():
    torch.compiler.reset()
    a, b = (torch.randn(3, 2, 7, 7, requires_grad=True) for _ in range(2))
    call = torch.compile(
        lambda a, b: (a @ b.transpose(-1, -2)) @ b[:, :1].expand_as(b), backend="ort",
        options={"strict": True},
    )  # fmt: skip
    result = call(a, b)
    result.square().sum().backward()
    assert torch_ort.counters()["steps_product"] == 6
    c, d = (x.detach().double().requires_grad_() for x in (a, b))
    want = (c @ d.transpose(-1, -2)) @ d[:, :1].expand_as(d)
    want.square().sum().backward()
    for got, exact in ((result, want), (a.grad, c.grad), (b.grad, d.grad)):
        torch.testing.assert_close(
            got.double(), exact, rtol=1e-5, atol=2e-6 * exact.abs().max().item()
        )


def test_profilers_see_the_operator():
    torch.compiler.reset()
    call = torch.compile(torch.addmm, backend="ort", options={"strict": True})
    operands = torch.randn(6), torch.randn(4, 5), torch.randn(5, 6)
    call(*operands)
    with torch.profiler.profile(record_shapes=True) as profiler:
        call(*operands)
    (event,) = [each for each in profiler.events() if each.name == "aten::addmm"]
    assert event.input_shapes[:3] == [[6], [4, 5], [5, 6]]
    assert torch_ort.counters()["steps_product"] == 2
