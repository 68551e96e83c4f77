"""Replaces checks of Megatron's `FP16_Optimizer`, to treat all gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from torch_ort.onnxruntime_training.optim import replacing
from torch_ort.optim.gradients import isa_in_force, sum_squares
from torch_ort.optim.scaled_step import NORM_EPS

_CLASS = "megatron.fp16.fp16.FP16_Optimizer"


def is_theirs(optimizer: Any) -> bool:
    """Tell whether it is this class."""
    return _CLASS in replacing.class_names(optimizer)


def replace(
    optimizer: Any,
    get_horizontal_model_parallel_rank: Callable[[], int] | None = None,
    get_horizontal_model_parallel_group: Callable[[], Any] | None = None,
) -> str:
    """Replace `_check_overflow`, and `clip_master_grads` if both functions are given.

    Returns the text of the warning. Raises NotReplaced.
    """
    theirs = replacing.method(optimizer, "clip_master_grads")
    replacing.check_arguments(theirs, ["max_norm", "norm_type"])
    replacing.check_arguments(replacing.method(optimizer, "_check_overflow"), [])
    needed = ("fp16_groups", "fp32_from_fp32_groups", "loss_scaler", "optimizer", "overflow")
    replacing.check_attributes(optimizer, needed)
    isa = isa_in_force()

    def _check_overflow(self: Any) -> None:
        groups = (*self.fp16_groups, *self.fp32_from_fp32_groups)
        grads = [param.grad for group in groups for param in group if param.grad is not None]
        # Megatron's scaler asks the other ranks, or no rank if the scale is fixed.
        number = SimpleNamespace(grad=torch.tensor([sum_squares(grads, isa)]))
        self.overflow = self.loss_scaler.has_overflow([number])

    replacing.bind(optimizer, _check_overflow)
    if get_horizontal_model_parallel_rank is None or get_horizontal_model_parallel_group is None:
        return (
            "clip_master_grads stays as it is without get_horizontal_model_parallel_rank "
            "and get_horizontal_model_parallel_group"
        )

    def clip_master_grads(self: Any, max_norm: float, norm_type: float = 2) -> float:
        if self.overflow or float(norm_type) != 2:
            return theirs(max_norm, norm_type)
        params = [
            param
            for group in self.optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        is_first = get_horizontal_model_parallel_rank() == 0
        # Parameters that are not divided are on every rank, but count only once.
        counted = [p.grad for p in params if is_first or getattr(p, "model_parallel", False)]
        total = torch.tensor(sum_squares(counted, isa), dtype=torch.float64)
        if params:
            total = total.to(params[0].grad.device)
        dist.all_reduce(total, group=get_horizontal_model_parallel_group())
        total_norm = total.sqrt().item()
        factor = max_norm / (total_norm + NORM_EPS)
        if factor < 1:
            for param in params:
                param.grad.mul_(factor)
        return total_norm

    replacing.bind(optimizer, clip_master_grads)
    return ""
