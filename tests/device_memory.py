"""The memory that tensors of a CUDA device have once nothing runs any more."""

from __future__ import annotations

import functools
import gc

import torch


def settled() -> int:
    """Return the bytes that are allocated on the current device once all calls have ended.

    A backward returns before autograd's thread of the device lets go of the last gradients. The
    next backward waits for that thread, which then holds nothing but what lives on anyway.
    """
    gc.collect()
    leaf, gradient = _something_to_differentiate(torch.cuda.current_device())
    torch.autograd.grad(leaf, leaf, gradient)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@functools.cache
def _something_to_differentiate(device: int) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = torch.ones((), device=torch.device("cuda", device), requires_grad=True)
    return leaf, torch.ones_like(leaf)
