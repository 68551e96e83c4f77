"""Parts of tensors seen in another shape, with open sizes: strides of the view, or a copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_ort

pytestmark = pytest.mark.ort_only

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "every_second_channel": lambda x: x[:, ::2].flatten(2),
    "channels": lambda x: x[:, 1:].flatten(2),
    "all_but_the_first_dim": lambda x: x[:, 1:].flatten(1),
    "one_channel": lambda x: x[:, 0].flatten(1),
    "inner_rows": lambda x: x[:, :, 1:-1].flatten(2),
    "every_second_row": lambda x: x[:, :, ::2].flatten(2),  # takes a copy
    "every_second_column": lambda x: x[..., ::2].flatten(0, 2),
    "permuted": lambda x: x.permute(0, 2, 3, 1).flatten(1, 2),
    "permuted_apart": lambda x: x.permute(0, 2, 1, 3).flatten(1, 2),  # takes a copy
    "expanded": lambda x: x.sum(1, keepdim=True).expand(-1, 3, -1, -1).flatten(2),
    "divided": lambda x: x[:, 1:].flatten(2).unflatten(2, (x.shape[2], -1)),
    "divided_channels": lambda x: x[:, 1:].flatten(2).unflatten(1, (2, -1)),
    "channels_divided_by_all_sizes": lambda x: x[:, 1:].flatten(2).unflatten(1, (-1, 2)),
    "permuted_and_divided": lambda x: x.permute(2, 3, 0, 1)[..., 1:].unflatten(3, (2, -1)),
    "multiplied": lambda x: x[:, 1:].flatten(2) @ x[:, :-1].flatten(2).transpose(1, 2) * 0.05,
}


class Scaled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.function(x * self.scale)
        return seen, seen.sin() + 1


def step_both(
    model: Scaled, call: Callable, x: Tensor, **near: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compare results and gradients of a step; give results of eager PyTorch and of the engine."""
    y = x.detach().clone().requires_grad_()
    want, got = model(x), call(y)
    torch.testing.assert_close(got, want, **near)
    gradients = []
    for results, leaf in ((want, x), (got, y)):
        total = sum(each.square().sum() for each in results)
        gradients.append(torch.autograd.grad(total, [leaf, model.scale]))
    torch.testing.assert_close(gradients[1], gradients[0])
    return want, got


ROADS: dict[str, Callable[[nn.Module], Callable]] = {
    "compile": lambda model: torch.compile(model, backend="ort", dynamic=True),
    "module": torch_ort.ORTModule,
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", SHAPES)
def test_open_sizes(name: str, road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.compiler.reset()
    torch_ort.reset_counters()
    torch.manual_seed(0)
    model = Scaled(SHAPES[name])
    call = ROADS[road](model)
    for size in [(2, 5, 6, 8), (3, 5, 4, 10), (2, 5, 6, 8)]:
        x = torch.randn(size, requires_grad=True)
        want, got = step_both(model, call, x, rtol=1e-5, atol=5e-5)  # products among them
        assert [each.stride() for each in got] == [each.stride() for each in want]
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["graphs_captured"]) == (0, 1)
    assert counters["recordings_handed_over"] == 0


ONE = {
    "regrouped": lambda x: x[..., 0].reshape(x.shape[0], -1, 1, 4).transpose(2, 3),
    "permuted": lambda x: x.permute(1, 0, 2, 3).reshape(x.shape[1], -1),
    "permuted_and_sliced": lambda x: x.permute(1, 0, 2, 3)[:, :, 1:].reshape(x.shape[1], -1),
    "a_dim_between": lambda x: x[..., 0].permute(1, 0, 2).reshape(x.shape[1], 1, *x.shape[0:3:2]),
    "the_last_size_as_a_number": lambda x: x[..., 1].reshape(x.shape[0], 1, x.shape[1], 4),
    "the_batch_and_the_rest": lambda x: x.permute(1, 0, 2, 3).reshape(x.shape[0] * x.shape[1], -1),
    "divided": lambda x: x.permute(0, 2, 1, 3).unflatten(1, (2, -1)),
}


@pytest.mark.parametrize("first", [(4, 1), (1, 5), (1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("name", ONE)
def test_captured_with_sizes_of_one(
    name: str, first: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch_ort.reset_counters()
    torch.manual_seed(0)
    model = Scaled(ONE[name])
    call = torch_ort.ORTModule(model)
    for sizes in [first, (2, 3), (1, 1), (3, 2), first]:
        x = torch.randn(*sizes, 4, 6, requires_grad=True)
        step_both(model, call, x)
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["recordings_handed_over"]) == (0, 0)


def test_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.compiler.reset()
    torch_ort.reset_counters()
    model = Scaled(SHAPES["multiplied"])
    x = torch.randn(0, 5, 6, 8, requires_grad=True)
    torch.testing.assert_close(torch.compile(model, backend="ort", dynamic=True)(x), model(x))
    assert torch_ort.counters()["fallbacks"] == 0
