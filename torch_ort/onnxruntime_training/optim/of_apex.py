"""Replaces methods of optimizers from Apex' amp, to treat all gradients in one call."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from torch_ort.onnxruntime_training.optim import replacing

# The names of the corresponding methods of its own fused optimizers begin with these.
_WITH_MASTERS = "post_backward_with_master_weights"
_WITHOUT_MASTERS = "post_backward_no_master_weights"


def is_theirs(optimizer: Any) -> bool:
    """Tell whether Apex' `amp.initialize` has had this optimizer."""
    return hasattr(optimizer, "_amp_stash")


def replace(optimizer: Any, **_: Any) -> str:
    """Replace `_post_amp_backward`, and `zero_grad` if there are master weights.

    Raises NotReplaced.
    """
    theirs = replacing.method(optimizer, "_post_amp_backward")
    if not theirs.__func__.__module__.startswith("apex."):
        raise replacing.NotReplaced("its _post_amp_backward is not of Apex")
    if not theirs.__name__.startswith((_WITH_MASTERS, _WITHOUT_MASTERS)):
        raise replacing.NotReplaced(f"its _post_amp_backward is {theirs.__name__}")
    replacing.check_arguments(theirs, ["scaler"])
    replacing.method(optimizer, "_amp_lazy_init")
    if theirs.__name__ == _WITH_MASTERS:
        optimizer._post_amp_backward = types.MethodType(_post_with_masters, optimizer)
    if theirs.__name__ == _WITHOUT_MASTERS:
        optimizer._post_amp_backward = types.MethodType(_post_without_masters, optimizer)
    if theirs.__name__.startswith(_WITH_MASTERS):
        optimizer.zero_grad = types.MethodType(_zero_grad, optimizer)
    return ""


def _post_with_masters(self: Any, scaler: Any) -> None:
    """Bring scaled gradients of the model to its float32 weights, unscaled and added up."""
    self._amp_lazy_init()
    stash = self._amp_stash
    pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
    new = [(to, of.grad.to(to.dtype)) for of, to in pairs if of.grad is not None]
    grads, older = _take_stashed(
        stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash
    )
    _unscale([*(grad for _, grad in new), *grads], scaler)
    _add(older)
    for master, grad in new:
        master.grad = grad if master.grad is None else master.grad.add_(grad)


def _post_without_masters(self: Any, scaler: Any) -> None:
    """Unscale the gradients of the model, and add those from before."""
    self._amp_lazy_init()
    stash = self._amp_stash
    for params, stashed in (
        (stash.all_fp16_params, stash.all_fp16_grad_stash),
        (stash.all_fp32_params, stash.all_fp32_grad_stash),
    ):
        grads, older = _take_stashed(params, stashed)
        _unscale(grads, scaler)
        _add(older)


def _take_stashed(
    params: list[Tensor], stashed: list[Tensor | None]
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Give the new gradients, and with those that have one the gradient from before.

    Empties the stash: where there is no new gradient, the one from before comes back.
    """
    grads: list[Tensor] = []
    older: list[tuple[Tensor, Tensor]] = []
    for i, (param, before) in enumerate(zip(params, stashed, strict=True)):
        stashed[i] = None
        if param.grad is None:
            param.grad = before
            continue
        grads.append(param.grad)
        if before is not None:
            older.append((param.grad, before))
    return grads, older


def _unscale(grads: list[Tensor], scaler: Any) -> None:
    """Divide gradients of one dtype by the scale, and tell the scaler of what is not finite."""
    if not grads:
        return
    device = grads[0].device
    found_inf = torch.zeros((), device=device)
    inverse = torch.tensor(1 / scaler.loss_scale(), device=device)
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    unscale(grads, found_inf, inverse)
    if scaler.dynamic and found_inf.item():
        scaler._has_overflow = True
        scaler._overflow_buf.fill_(1)


def _add(older: list[tuple[Tensor, Tensor]]) -> None:
    for grad, before in older:
        grad.add_(before)


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Drop the gradients of the model, or make them zeros, and drop those of its master weights."""
    self._amp_lazy_init()
    stash = self._amp_stash
    for param in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params):
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.detach_().zero_()
    for master in stash.all_fp32_from_fp16_params:
        master.grad = None
