"""Models that join and cut the axis of features: no pass over memory is left for it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparison import assert_as_exact_as_eager
from torch import Tensor, nn

import torch_ort

pytestmark = pytest.mark.ort_only
WIDTH = 32
# Copies that the engine would make by kernels of their own.
COPIES = ("aten::cat", "aten::stack", "aten::slice_backward", "aten::copy_", "aten::neg")


class Rotary(nn.Module):
    """Attention with rotary positions; `halve` says how queries and keys are cut."""

    def __init__(self, halve: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.project, self.halve = nn.Linear(WIDTH, 3 * WIDTH), halve
        angles = torch.outer(torch.arange(64.0), 100 ** -(torch.arange(4) / 4)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        left, right = self.halve(x)
        length = x.shape[-2]
        turned = torch.cat([-right, left], -1)
        return x * self.cosine[:length] + turned * self.sine[:length]

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (4, 8)).transpose(1, 2)
            for part in self.project(x).chunk(3, -1)
        ]  # fmt: skip
        query, key = self.rotate(heads[0]), self.rotate(heads[1])
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ heads[2]
        return mixed.transpose(1, 2).flatten(2)


class Gated(nn.Module):
    """A gated feed-forward with one product for both halves."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH), gate

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(self.gate(gate) * value)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        return torch.stack([x.sin(), x.cos()], -1).tanh().flatten(-2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "rotary_chunks": lambda: Rotary(lambda x: x.chunk(2, -1)),
    "rotary_slices": lambda: Rotary(lambda x: (x[..., :4], x[..., 4:])),
    "rotary_negative_slices": lambda: Rotary(lambda x: (x[..., :-4], x[..., -4:])),
    "rotary_interleaved": lambda: Rotary(lambda x: (x[..., ::2], x[..., 1::2])),
    "silu_gate": lambda: Gated(F.silu),
    "gelu_gate": lambda: Gated(F.gelu),
    "stacked": Stacked,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_gradients_for_several_sizes(name: str, dtype: torch.dtype) -> None:
    """One graph with symbolic sizes; eager PyTorch in float64 is what both are measured against."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    compiled = torch.compile(copy.deepcopy(model), backend="ort", dynamic=True)
    before = torch_ort.counters()["graphs_compiled"]
    for batch, length in [(2, 5), (3, 64), (4, 17), (2, 33)]:
        x = torch.randn(batch, length, WIDTH).to(dtype)
        assert_as_exact_as_eager(model, compiled, x)
    assert torch_ort.counters()["graphs_compiled"] == before + 1


def copies_of(model: nn.Module, x: Tensor) -> list[str]:
    result = torch_ort.profile(model, x, steps=1)
    names = [op for step in result.steps if step.microseconds for op in step.op.split(", ")]
    return [op for op in names if op.startswith(COPIES)]


@pytest.mark.parametrize("name", ["silu_gate", "gelu_gate"])
def test_no_copies_are_left(name: str) -> None:
    copies = copies_of(MODELS[name](), torch.randn(2, 16, WIDTH, requires_grad=True))
    assert not copies, copies


@pytest.mark.parametrize("name", ["rotary_chunks", "rotary_slices"])
def test_nothing_is_copied_to_join_it(name: str) -> None:
    copies = copies_of(MODELS[name](), torch.randn(2, 16, WIDTH, requires_grad=True))
    assert all("copy_" in op for op in copies), copies


class Doubled(nn.Module):
    """What is joined is scaled, so that the gradients of both parts are cut from one product."""

    def __init__(self, dim: int, images: bool) -> None:
        super().__init__()
        self.dim, self.scale = dim, nn.Parameter(torch.tensor(1.5))
        width = 16 if dim == 1 else 8
        around = (nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(width, 8, 3, padding=1))
        self.before, self.after = around if images else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(torch.cat([x, x.tanh()], self.dim) * self.scale)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("images", [False, True], ids=["alone", "between_convolutions"])
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("size", [(2, 8, 6, 4), (2, 8, 6, 1), (2, 8, 1, 4)], ids=str)
def test_gradients_of_parts_that_operators_read(
    size: tuple[int, ...], dim: int, images: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Doubled(dim, images)
    x = torch.randn(size, requires_grad=True)
    compiled = torch.compile(copy.deepcopy(model), backend="ort", dynamic=dynamic)
    assert_as_exact_as_eager(model, compiled, x)
    y = x.detach().requires_grad_()
    assert compiled(y).stride() == model(x).stride()
    assert torch_ort.counters()["fallbacks"] == 0


def test_an_empty_part_of_what_has_one_row() -> None:
    def cut(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product = x * weight
        return product[1:] * 2, product[:1] * 3

    found = []
    for call in (cut, torch.compile(cut, backend="ort")):
        x, weight = torch.linspace(-1, 1, 4).view(1, 4), torch.ones(1, 4).requires_grad_()
        results = call(x, weight)
        (results[0].sum() + results[1].sum()).backward()
        found.append([*results, weight.grad])
    torch.testing.assert_close(found[1], found[0])
    assert torch_ort.counters()["fallbacks"] == 0
