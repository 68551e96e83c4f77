"""The instruction set of optimizer steps, and norms and sums over gradients of any kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ort import _C


def isa_in_force() -> str:
    """Give the instruction set that the options ask for; "" for the widest."""
    # `python -m torch_ort.options` must be the first to import the module.
    from torch_ort.options import resolve

    return resolve().isa


def sum_squares(tensors: Sequence[Tensor], isa: str) -> float:
    """Give the sum of the squares of all numbers, in float64.

    It is finite exactly if all numbers are, but that float64 itself may overflow (above 1e154).
    What is not dense on the CPU is summed by PyTorch.
    """
    total, left = _C.sum_squares(list(tensors), isa=isa)
    norms = [norm_by_torch(tensors[i]) for i in left]
    if norms:
        total += torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum().item()
    return total


def norm_by_torch(tensor: Tensor) -> Tensor:
    """Give the norm of a tensor; of a DTensor that of the whole one, in each process."""
    found = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def norm(tensors: Sequence[Tensor], isa: str) -> float:
    """Give the Euclidean norm of all tensors as one vector."""
    return math.sqrt(sum_squares(tensors, isa))
