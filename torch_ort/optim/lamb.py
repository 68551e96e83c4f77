"""LAMB: Adam's direction, scaled by the norm of the parameter."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from torch_ort import _C
from torch_ort.optim import on_cuda
from torch_ort.optim.gradients import norm_by_torch
from torch_ort.optim.scaled_step import Group, Operands, Params, ScaledStep, checked, update_moments


class Lamb(ScaledStep):
    """LAMB (You et al., "Large batch optimization for deep learning", 2020), for large batches.

    With the gradient g, t = `group["step"]`, `m <- beta1 m + (1 - beta1) g`,
    `v <- beta2 v + (1 - beta2) g^2`, `c1 = 1 - beta1^t`, `c2 = 1 - beta2^t` (both 1 without
    `bias_correction`), a parameter p becomes:

    - `r = m / c1 / (sqrt(v / c2) + eps) + weight_decay p`
    - `p <- p - lr ratio r`, where the ratio is `|p| / |r|`, or 1 if one of them is 0, and then
      brought between `ratio_min` and `ratio_max`

    Norms are Euclidean norms of single parameters. Dtypes, devices, state and `state_dict` are
    those of `FusedAdam`.

    Args:
        params: parameters, or groups with the settings below (but `max_norm`) as keys.
        lr: learning rate.
        betas: the factors with which a step decays the running means of g and of its square.
        eps: added to the denominator, so that the quotient stays finite.
        weight_decay: the factor of p in r.
        bias_correction: whether the running means are corrected for starting at 0.
        ratio_min: the lower limit of the ratio.
        ratio_max: the upper limit of the ratio.
        max_norm: the norm to which all gradients together are clipped, in steps that are given no
            limit of their own; None: no clipping.

    Raises:
        ValueError: a number is out of its range.
    """

    _rule_name = "lamb"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = False,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        max_norm: float | None = None,
    ) -> None:
        if not ratio_min <= ratio_max:
            raise ValueError(f"Lamb: ratio_min: got {ratio_min}, want at most {ratio_max}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
        }
        super().__init__(params, checked("Lamb", defaults))
        self.limit_norm(max_norm)

    def _rule(self, group: Group, factor: float) -> Any:
        beta1, beta2 = group["betas"]
        corrected = group["bias_correction"]
        return _C.LambRule(
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], gradient_factor=factor,
            mean_correction=1 / (1 - beta1 ** group["step"]) if corrected else 1.0,
            inverse_correction=(1 - beta2 ** group["step"]) ** -0.5 if corrected else 1.0,
            ratio_min=group["ratio_min"], ratio_max=group["ratio_max"],
        )  # fmt: skip

    def _settings(self, group: Group, taken: float | Tensor) -> Any:
        beta1, beta2 = group["betas"]
        return on_cuda.settings(
            group["lr"], taken, beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], corrects=group["bias_correction"],
            ratio_min=group["ratio_min"], ratio_max=group["ratio_max"],
        )  # fmt: skip

    def _step_of_engine(self, operands: Operands, rules: list[Any]) -> list[int]:
        return _C.lamb_update(*operands.lists(), rules, isa=self._isa)

    def _step_of_torch(
        self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rule: Any
    ) -> None:
        old, g = param.to(mean.dtype), grad.to(mean.dtype) * rule.gradient_factor
        update_moments(mean, square, g, rule)
        r = mean * rule.mean_correction / (square.sqrt() * rule.inverse_correction + rule.eps)
        r += rule.weight_decay * old
        norms = [norm_by_torch(x).item() for x in (old, r)]
        ratio = 1.0 if 0 in norms else norms[0] / norms[1]
        ratio = min(max(ratio, rule.ratio_min), rule.ratio_max)
        param.copy_(old.sub(r, alpha=rule.lr * ratio))
