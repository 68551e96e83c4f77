"""bfloat16 and float16 in regions: rounded between operators as eager does, or only at the end."""

from __future__ import annotations

import pytest
import regions
import torch
import torch.nn.functional as F
from regions import ISAS
from torch import nn

import torch_ort
from torch_ort import _C

SHORT = (torch.bfloat16, torch.float16)


def chain(dtype: torch.dtype, size: tuple[int, ...]) -> _C.Graph:
    text = regions.type_text(dtype, size)
    return regions.fused(
        regions.read(
            {"x": text, "y": text},
            ["a = Mul (x, y)", "b = Add (a, x)", "c = Mul (b, b)", "d = Sub (c, y)"],
            ["d"],
        )
    )


@regions.also_on_cuda
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [(40,), (7, 33), (3, 2000)])
@pytest.mark.parametrize("dtype", SHORT)
def test_each_value_is_rounded(dtype: torch.dtype, size: tuple[int, ...], isa: str) -> None:
    torch.manual_seed(0)
    inputs = {name: torch.randn(size).to(dtype) for name in "xy"}
    graph = chain(dtype, size)
    x, y = inputs.values()
    (got,) = regions.run_by_name(graph, inputs, isa, emulate_eager_casts=True).values()
    a = x * y
    assert torch.equal(got, (a + x) * (a + x) - y)
    (wide,) = regions.run_by_name(graph, inputs, isa).values()
    a = x.float() * y.float()
    assert torch.equal(wide, ((a + x.float()).square() - y.float()).to(dtype))


def test_special_values_are_rounded_to_what_the_type_holds() -> None:
    values = [0.0, -0.0, 65504.0, 65536.0, 1e-8, torch.inf, -torch.inf, torch.nan, 2049.0]
    text = regions.type_text(torch.float32, (len(values),))
    graph = regions.fused(
        regions.read(
            {"x": text},
            ["h = Cast <to = 10> (x)", "f = Cast <to = 1> (h)", "n = Neg (f)", "y = Abs (n)"],
            ["y"],
        )
    )
    x = torch.tensor(values)
    (got,) = _C.run(graph, {"x": x}, _C.SessionOptions(emulate_eager_casts=True)).values()
    want = x.half().float().abs()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self.first(x)) * 1.7 - 0.3
        x = x + self.second(inner * inner.sigmoid())
        return F.softmax(self.norm(x) * 0.9 + x, -1)


def gradients(call, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = call(x)
    weight = torch.linspace(-1, 1, 32, dtype=x.dtype)
    (result * weight).sum().backward()
    found = [result.detach(), *(param.grad for param in model.parameters())]
    model.zero_grad()
    return found


def distance(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    return sum(((a - b).norm() / b.norm()).item() for a, b in pairs)


def test_training_in_bfloat16() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    torch_ort.reset_counters()
    model = Block().to(torch.bfloat16)
    x = torch.randn(40, 32).to(torch.bfloat16)
    exact_model = Block().double()
    exact_model.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    exact = gradients(exact_model, exact_model, x.double())
    eager = gradients(model, model, x)
    wide = gradients(torch.compile(model, backend="ort"), model, x)
    torch.compiler.reset()
    options = {"emulate_eager_casts": True}
    emulated = gradients(torch.compile(model, backend="ort", options=options), model, x)
    # Rounding less often is closer to the exact numbers, rounding as eager closer to eager's.
    assert distance(wide, exact) <= distance(eager, exact)
    assert distance(emulated, eager) < distance(wide, eager)
    assert torch_ort.counters()["fallbacks"] == 0
