"""Eager PyTorch with the products of another library, without that library."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Library:
    """Computes as oneDNN would, and counts."""

    def __init__(self) -> None:
        self.products = 0

    def takes(self, x: torch.Tensor) -> bool:
        return x.dtype == torch.float32

    def product(self, result, a, b, start=0.0):
        def run() -> None:
            self.products += 1
            result.mul_(start).nan_to_num_(0).add_((a[:, :, None] * b).sum(1))

        return run


def trained(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).to(dtype)
    loss = model(torch.linspace(-1, 1, 20, dtype=dtype).view(4, 5)).square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.fixture
def onednn(load_script):
    return load_script("onednn")


def test_products_are_the_librarys_while_it_is_there(onednn) -> None:
    want = trained(torch.float32)
    library = Library()
    replaced = onednn.replace_products(library)
    try:
        got = trained(torch.float32)
        # Two forward, two gradients of weights, one of what is between.
        assert library.products == 5
        trained(torch.float64)
        assert library.products == 5
    finally:
        replaced._destroy()
    torch.testing.assert_close(got, want)
    trained(torch.float32)
    assert library.products == 5


@pytest.mark.parametrize("size", [(3, 4), (1, 4), (3, 1)])
def test_layouts(size, onednn) -> None:
    takes, layout = onednn.OneDnn.takes, onednn.OneDnn._layout
    x = torch.randn(size)
    assert takes(x)
    assert takes(x.t())
    rows, columns = size
    assert layout(x) == (b"N", columns)
    assert layout(x.t())[1] >= 1
    assert not takes(x.double())
    assert not takes(torch.randn(rows, columns, 2)[..., 0])
    assert not takes(x[:0])


def test_a_library_that_is_not_there(onednn) -> None:
    with pytest.raises(OSError, match=r"libnone\.so"):
        onednn.OneDnn("libnone.so")
