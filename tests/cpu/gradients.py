"""What tests of convolutions share: sizes of results, and gradients against those in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.cpu.regions import assert_near


def result_size(size: int, window: int, stride: int, pad: int, dilation: int) -> int:
    """Return the pixels that a convolution makes of `size` pixels, by the formula of nn.Conv2d."""
    return (size + 2 * pad - dilation * (window - 1) - 1) // stride + 1


def assert_same_bits_for_any_threads(run: Callable[[], Sequence[Tensor]]) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.pairwise(results):
        assert all(map(torch.equal, one, other))


def last(x: Tensor) -> Tensor:
    """Return an image, or a volume, with its channels last."""
    return x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    )


def last_strides(sizes: Sequence[int]) -> str:
    """Return the strides of such an image, as a graph's text has them."""
    return "[" + ", ".join(map(str, last(torch.empty(sizes, device="meta")).stride())) + "]"


def compare_gradients(model: nn.Module, exact: nn.Module, atol: float) -> None:
    """Compare the gradients of all parameters; they are laid out as the parameters are."""
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None)
        if got.grad is not None:
            assert got.grad.stride() == got.stride()
            assert_near(got.grad, want.grad, atol=atol)


def compare_at_sizes(model: nn.Module, sizes: Sequence[Sequence[int]], atol: float) -> None:
    """Compare the gradients for images of other sizes, all through one compiled model."""
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort", dynamic=True)
    for size in sizes:
        x = torch.randn(size)
        for each in (model, exact):
            each.zero_grad()
        compiled(x).square().mean().backward()
        exact(x.double()).square().mean().backward()
        compare_gradients(model, exact, atol)


def compare_two_calls(model: nn.Module, size: Sequence[int]) -> None:
    """Compare the gradients of two calls, both of which are alive before the first backward."""
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort")
    batches = [torch.randn(size) for _ in range(2)]
    for call, to in ((compiled, torch.float32), (exact, torch.float64)):
        results = [call(x.to(to)).square().mean() for x in batches]
        for result in reversed(results):
            result.backward()
    compare_gradients(model, exact, 8e-6)


def compare_training(model: nn.Module, x: Tensor, atol: float) -> None:
    """Compare results and gradients of three steps; `atol` is of the first one's gradients."""
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort")
    mine, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, exact))
    for step in range(3):
        y, want = compiled(x), exact(x.double())
        assert_near(y.detach(), want.detach(), atol=1e-5 * (step + 1))
        y.square().mean().backward()
        want.square().mean().backward()
        compare_gradients(model, exact, atol * (step + 1))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()


def compare_frozen(model: nn.Module, x: Tensor, layers: Sequence[nn.Module], atol: float) -> None:
    """Compare gradients, of the image too, where the weights of some layers need none."""
    for layer in layers:
        layer.weight.requires_grad_(False)
    exact = copy.deepcopy(model).double()
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    torch.compile(model, backend="ort")(mine).square().mean().backward()
    exact(theirs).square().mean().backward()
    compare_gradients(model, exact, atol)
    assert_near(mine.grad, theirs.grad, atol=atol)
