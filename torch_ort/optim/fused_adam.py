"""`FusedAdam` of ONNX Runtime Training: Adam in three forms of weight decay."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

from torch import Tensor

from torch_ort import _C
from torch_ort.optim import on_cuda
from torch_ort.optim.scaled_step import Group, Operands, Params, ScaledStep, checked, update_moments


class AdamWMode(IntEnum):
    """The formula of `FusedAdam`: where its weight decay and its eps are applied."""

    ADAM_L2_REGULARIZATION = 0
    ADAMW_TRANSFORMERS = 1
    ADAMW_TORCH = 2


class FusedAdam(ScaledStep):
    """Adam, and AdamW as `transformers` and as PyTorch have it.

    With the gradient g, t = `group["step"]`, `m <- beta1 m + (1 - beta1) g`,
    `v <- beta2 v + (1 - beta2) g^2`, `c1 = 1 - beta1^t`, `c2 = 1 - beta2^t` (both 1 without
    `bias_correction`), a parameter p of each mode becomes:

    - `ADAM_L2_REGULARIZATION`, where g is first `g + weight_decay p`:
      `p - lr sqrt(c2) / c1 m / (sqrt(v) + eps)`
    - `ADAMW_TRANSFORMERS`: the same without that, then `p <- p - lr weight_decay p`
    - `ADAMW_TORCH`, where p is first `p - lr weight_decay p`:
      `p - lr / c1 m / (sqrt(v / c2) + eps)`

    The formulas are those of ONNX Runtime Training's class, modes 1 and 2 those of
    `transformers.AdamW` and `torch.optim.AdamW`. Parameters are float32, float64, bfloat16, float16
    or complex, of any device and layout; m and v of bfloat16 and float16 ones are float32, and all
    is computed in that dtype. `state_dict` and `load_state_dict` exchange states with
    `torch.optim.AdamW`, which computes the same in mode `ADAMW_TORCH`. All parameters of a group
    share its count of updates: the bias correction of a parameter whose first gradient comes late
    uses `group["step"]`, and not the number of its own updates.

    Args:
        params: parameters, or groups with the settings below as keys.
        lr: learning rate.
        bias_correction: whether the running means are corrected for starting at 0.
        betas: the factors with which a step decays the running means of g and of its square.
        eps: added to the denominator, so that the quotient stays finite.
        adam_w_mode: one of `AdamWMode`.
        weight_decay: the factor in the formulas above.
        set_grad_none: whether `zero_grad` always sets gradients to None, whatever its argument.

    Raises:
        ValueError: a number is out of its range, or there is no such mode.
    """

    _rule_name = "adam"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, checked("FusedAdam", defaults))
        self._adam_w_mode = AdamWMode(adam_w_mode)
        self._set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        ours = {"_adam_w_mode": self._adam_w_mode, "_set_grad_none": self._set_grad_none}
        return {**super().__getstate__(), **ours}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to 0 if both `set_to_none` and `set_grad_none` are False."""
        super().zero_grad(set_to_none=set_to_none or self._set_grad_none)

    def _rule(self, group: Group, factor: float) -> Any:
        lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        c1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        c2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        rule = _C.AdamRule(beta1=beta1, beta2=beta2, eps=group["eps"], gradient_factor=factor)
        rule.step_size = lr * math.sqrt(c2) / c1
        if self._adam_w_mode is AdamWMode.ADAM_L2_REGULARIZATION:
            rule.weight_decay = decay
            return rule
        rule.keep = 1 - lr * decay
        if self._adam_w_mode is AdamWMode.ADAMW_TORCH:
            rule.step_size, rule.inverse_correction = lr / c1, 1 / math.sqrt(c2)
        else:
            # (p - step) keep = keep p - keep step, so the step is multiplied too.
            rule.step_size *= rule.keep
        return rule

    def _settings(self, group: Group, taken: float | Tensor) -> Any:
        decay = {
            AdamWMode.ADAM_L2_REGULARIZATION: _C.StepDecay.GRADIENT,
            AdamWMode.ADAMW_TRANSFORMERS: _C.StepDecay.AFTER,
            AdamWMode.ADAMW_TORCH: _C.StepDecay.BEFORE,
        }
        beta1, beta2 = group["betas"]
        return on_cuda.settings(
            group["lr"], taken, beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], corrects=group["bias_correction"],
            decay=decay[self._adam_w_mode],
            plain_root=self._adam_w_mode is not AdamWMode.ADAMW_TORCH,
        )  # fmt: skip

    def _step_of_engine(self, operands: Operands, rules: list[Any]) -> list[int]:
        return _C.adam_update(*operands.lists(), rules, isa=self._isa)

    def _step_of_torch(
        self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rule: Any
    ) -> None:
        old, g = param.to(mean.dtype), grad.to(mean.dtype) * rule.gradient_factor
        if rule.weight_decay != 0:
            g = g.add(old, alpha=rule.weight_decay)
        update_moments(mean, square, g, rule)
        divisor = square.sqrt().mul_(rule.inverse_correction).add_(rule.eps)
        param.copy_((old * rule.keep).addcdiv_(mean, divisor, value=-rule.step_size))
