"""Parameters that autocast brings to another dtype are cast in one launch."""

from __future__ import annotations

import pytest
import torch
from gate import compile_texts, faults
from torch import nn

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.cuda


class Products(nn.Module):
    """Many products of small numbers that are whole, so that each sum is exact."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randint(-3, 4, shape, dtype=dtype, device="cuda") for shape in shapes
        )
        # As in the flat buffers of sharded training: no address that vectors could begin at.
        flat = torch.randint(-3, 4, (65,), dtype=dtype, device="cuda")
        self.unaligned = nn.Parameter(flat[1:].view(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (x[:, :8] @ self.unaligned).float()
        for weight in self.weights:
            total = total + x[:, : weight.shape[0]] @ weight
        return total


def steps_of(call, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, list[str]]:
    with watchers.watching() as programs, torch.autocast("cuda", dtype):
        result = call(x)
    return result, [op for program in programs for _, op, *_ in program.session.steps()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        [(8, 8)],
        [(8, 8), (0, 8), (3, 8), (1, 8)],
        [(1 + i % 8, 8) for i in range(300)],  # more than a launch takes
        [(4000, 8), (3, 8), (8191, 8)],  # more than a block takes
    ],
    ids=["one", "few", "many", "long"],
)
def test_all_in_one(dtype, shapes):
    torch.manual_seed(0)
    model = Products(shapes)
    width = max(8, *(shape[0] for shape in shapes))
    x = torch.zeros(5, width, device="cuda")
    x[:, :8] = torch.randint(-2, 3, (5, 8), device="cuda")
    x[:, -2:] = 1
    x.requires_grad_()  # so that backward reads the weights
    call = torch.compile(model, backend="ort")
    result, ops = steps_of(call, x, dtype)
    assert ops.count("torch_ort.Casts") == 1
    with torch.autocast("cuda", dtype):
        want = model(x)
    assert torch.equal(result, want)
    gradients = []
    for each in (result, want):
        model.zero_grad()
        each.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


def test_weights_follow_their_optimizer():
    """They are cast in each step, whose weights are others."""
    torch.manual_seed(0)
    results = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = Products([(8, 8), (5, 8)])
        call = torch.compile(model, backend="ort") if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = call(torch.ones(4, 8, device="cuda", requires_grad=True)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([loss.detach(), *(p.detach() for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_without_gradients_weights_are_cast_one_by_one():
    """Else all of them would be there twice at once."""
    model = Products([(8, 8), (5, 8)])
    with torch.no_grad():
        _, ops = steps_of(torch.compile(model, backend="ort"), torch.ones(4, 8, device="cuda"),
                          torch.bfloat16)  # fmt: skip
    assert "torch_ort.Casts" not in ops
    assert ops.count("aten::copy_") >= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_machine_code(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DUMP", "cuda")
    monkeypatch.setenv("TORCH_ORT_DUMP_DIR", str(tmp_path))
    call = torch.compile(Products([(8, 8)]), backend="ort")
    with torch.autocast("cuda", dtype):
        call(torch.ones(4, 8, device="cuda", requires_grad=True))
    (path,) = tmp_path.glob("casts_*.cu")
    for built in compile_texts({path.stem: path.read_text()}):
        assert faults(built, wide_loads=2, wide_stores=1) == []


def test_pass_may_be_switched_off():
    call = torch.compile(Products([(8, 8)]), backend="ort", options={"disable": "join_casts"})
    _, ops = steps_of(call, torch.ones(4, 8, device="cuda", requires_grad=True), torch.bfloat16)
    assert "torch_ort.Casts" not in ops
    assert torch_ort.counters()["fallbacks"] == 0
