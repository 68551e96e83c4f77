"""The autograd graph of a call that runs in eager PyTorch inside of a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def gradients_through(
    results: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], leaves: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Give the gradients of what the call was made of, from those of its results.

    None for what is no tensor or asks for none. The graph stays: its node's context ends it.
    """
    asks = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    asking = [leaf for leaf, asks_one in zip(leaves, asks, strict=True) if asks_one]
    found = iter(torch.autograd.grad(results, asking, given, retain_graph=True, allow_unused=True))
    return [next(found) if asks_one else None for asks_one in asks]
