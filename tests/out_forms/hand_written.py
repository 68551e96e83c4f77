"""Calls of the operators that most models run, and of some that PyTorch's database leaves out.

Some seconds' work, where the database takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.out_forms.samples import Collector, Watch

Values = Callable[..., Tensor]  # of given sizes, of the dtype at hand
Program = Callable[[Values], Any]

POINTWISE: tuple[Program, ...] = (
    lambda t: t(3, 4) + t(3, 4),
    lambda t: t(3, 4) - t(4),
    lambda t: t(3, 4) * t(()),
    lambda t: t(3, 4) / t(3, 1),
    lambda t: torch.add(t(3, 4), t(3, 4), alpha=2),
    lambda t: torch.neg(t(3, 4)),
    lambda t: torch.abs(t(3, 4)),
    lambda t: torch.exp(t(3, 4)),
    lambda t: torch.log(t(3, 4)),
    lambda t: torch.sqrt(t(3, 4)),
    lambda t: torch.rsqrt(t(3, 4)),
    lambda t: torch.reciprocal(t(3, 4)),
    lambda t: torch.sin(t(3, 4)),
    lambda t: torch.cos(t(3, 4)),
    lambda t: torch.tanh(t(3, 4)),
    lambda t: torch.sigmoid(t(3, 4)),
    lambda t: torch.erf(t(3, 4)),
    lambda t: torch.floor(t(3, 4)),
    lambda t: F.silu(t(2, 5)),
    lambda t: F.gelu(t(2, 5)),
    lambda t: F.elu(t(2, 5)),
    lambda t: F.softplus(t(2, 5)),
    lambda t: F.hardswish(t(2, 5)),
    lambda t: F.mish(t(2, 5)),
    lambda t: F.leaky_relu(t(2, 5)),
    lambda t: F.hardtanh(t(2, 5)),
    lambda t: F.hardsigmoid(t(2, 5)),
    lambda t: F.logsigmoid(t(2, 5)),
    lambda t: F.gelu(t(2, 5), approximate="tanh"),
    lambda t: F.relu6(F.relu(t(2, 5))),
    lambda t: torch.threshold(t(2, 5), 0.5, 0.0),
    lambda t: t(3, 4).pow(2),
    lambda t: t(3, 4).pow(0.5),
    lambda t: t(3, 4) ** t(3, 4),
    lambda t: 2 ** t(3, 4),
    lambda t: t(3, 4).clamp(0, 1),
    lambda t: t(3, 4).clamp_min(0),
    lambda t: t(3, 4).clamp(max=t(4)),
    lambda t: torch.maximum(t(3, 4), t(4)),
    lambda t: torch.minimum(t(3, 4), t(())),
    lambda t: torch.where(t(3, 4) > 0, t(3, 4), t(4)),
    lambda t: t(3, 4) == 1,
    lambda t: t(3, 4) != t(4),
    lambda t: t(3, 4) < 1,
    lambda t: t(3, 4) <= t(3, 1),
    lambda t: t(3, 4) > 0,
    lambda t: t(3, 4) >= t(3, 4),
    lambda t: t(3, 4).logical_not(),
    lambda t: t(3, 4).logical_and(t(4)),
    lambda t: torch.addcmul(t(3, 4), t(4), t(3, 1)),
    lambda t: torch.addcdiv(t(3, 4), t(4), t(3, 1)),
    lambda t: torch.lerp(t(3, 4), t(3, 4), 0.3),
    lambda t: torch.lerp(t(3, 4), t(3, 4), t(4)),
    lambda t: t(3, 4) // t(4),
    lambda t: t(3, 4) % 3,
    lambda t: t(3, 4).round(),
    lambda t: t(3, 4).sign(),
)
PRODUCTS: tuple[Program, ...] = (
    lambda t: t(3, 4) @ t(4, 5),
    lambda t: t(3, 4) @ t(4),
    lambda t: t(4) @ t(4),
    lambda t: t(2, 3, 4) @ t(2, 4, 5),
    lambda t: torch.addmm(t(5), t(3, 4), t(4, 5)),
    lambda t: torch.addmm(t(3, 5), t(3, 4), t(4, 5), beta=0, alpha=2),
    lambda t: torch.addmv(t(3), t(3, 4), t(4)),
    lambda t: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5), beta=0.5),
    lambda t: t(0, 4) @ t(4, 5),
    lambda t: t(3, 0) @ t(0, 5),
    lambda t: t(2, 3, 0) @ t(2, 0, 5),
    lambda t: F.linear(t(2, 3, 4), t(5, 4), t(5)),
)
REDUCTIONS: tuple[Program, ...] = (
    lambda t: t(3, 4).sum(),
    lambda t: t(3, 4).sum(0),
    lambda t: t(3, 4, 5).sum((0, 2), keepdim=True),
    lambda t: t(0, 4).sum(),
    lambda t: t(0, 4).sum(0),
    lambda t: t(()).sum(0),
    lambda t: t(3, 4).sum(1, dtype=torch.float32),
    lambda t: t(3, 4).mean(),
    lambda t: t(3, 4).mean(0),
    lambda t: t(3, 4, 5).mean((0, 2)),
    lambda t: t(()).mean(0),
    lambda t: t(3, 4).amax(1),
    lambda t: t(3, 4).amin((0, 1)),
    lambda t: t(3, 4).max(1),
    lambda t: t(3, 4).min(0),
    lambda t: t(3).max(),
    lambda t: t(3, 4).argmax(1),
    lambda t: t(3, 4).argmin(),
    lambda t: t(3, 4).any(1),
    lambda t: t(3, 4).all(),
    lambda t: t(3, 4).var(1),
    lambda t: t(3, 4).std((0, 1)),
    lambda t: t(3, 4).prod(1),
    lambda t: t(3, 4).norm(dim=1),
    lambda t: t(3, 4).cumsum(1),
    lambda t: t(3, 4).cumprod(0),
    lambda t: t(3, 4).logcumsumexp(1),
    lambda t: F.softmax(t(3, 4), -1),
    lambda t: F.log_softmax(t(3, 4), -1),
    lambda t: F.softmax(t(3, 4, 5), 1),
    lambda t: F.log_softmax(t(3, 4), 0),
    lambda t: F.softmax(t(()), 0),
    lambda t: F.softmax(t(3, 0), 1),
    lambda t: t(3, 4).topk(2),
    lambda t: t(3, 4).sort(0),
    lambda t: t(3, 4).median(1),
    lambda t: t(3, 4).kthvalue(2),
)
LOOK_UPS: tuple[Program, ...] = (
    lambda t: t(5, 3).index_select(0, labels(t, 4, 5)),
    lambda t: t(5, 3)[labels(t, 2, 5)],
    lambda t: F.embedding(labels(t, 4, 5), t(5, 3)),
    lambda t: t(5, 3).gather(1, labels(t, 5, 3).unsqueeze(1)),
    lambda t: t(5, 3).scatter(1, labels(t, 5, 3).unsqueeze(1), t(5, 1)),
    lambda t: t(5, 3).scatter(1, labels(t, 5, 3).unsqueeze(1), 2),
    lambda t: t(5, 3).scatter_add(1, labels(t, 5, 3).unsqueeze(1), t(5, 1)),
    lambda t: t(5, 3).index_add(0, labels(t, 4, 5), t(4, 3)),
    lambda t: t(5, 3).index_copy(0, labels(t, 4, 5), t(4, 3)),
    lambda t: torch.cat([t(2, 3), t(4, 3)]),
    lambda t: torch.cat([t(2, 3), t(2, 1)], 1),
    lambda t: torch.stack([t(2, 3), t(2, 3)], 1),
    lambda t: torch.cat([t(2, 0), t(2, 3)], 1),
    lambda t: t(4, 5).tril(),
    lambda t: t(4, 5).triu(1),
    lambda t: t(2, 4, 4).tril(-1),
)
IMAGES: tuple[Program, ...] = (
    lambda t: F.avg_pool2d(t(2, 3, 6, 6), 2),
    lambda t: F.max_pool2d(t(2, 3, 6, 6), 2),
    lambda t: F.adaptive_avg_pool2d(t(2, 3, 6, 5), (2, 3)),
    lambda t: F.adaptive_avg_pool2d(t(1, 3, 4, 4), 1),
    lambda t: F.interpolate(t(2, 3, 4, 4), scale_factor=2.0),
    lambda t: F.interpolate(t(2, 3, 4, 4), size=(7, 5), mode="bilinear"),
    lambda t: F.interpolate(t(2, 3, 4, 4), size=(7, 5), mode="bicubic"),
    lambda t: F.pad(t(2, 3, 4, 4), (1, 2, 1, 0), "reflect"),
    lambda t: F.pad(t(2, 3, 4), (1, 2), "replicate"),
)
LOSSES: tuple[Program, ...] = (
    lambda t: F.nll_loss(t(6, 4), labels(t, 6, 4), reduction="none"),
    lambda t: F.nll_loss(t(6, 4), labels(t, 6, 4), reduction="mean"),
    lambda t: F.nll_loss(t(6, 4), labels(t, 6, 4), reduction="sum"),
    lambda t: F.nll_loss(t(6, 4), labels(t, 6, 4), weight=t(4), ignore_index=1),
    lambda t: F.nll_loss(t(2, 4, 3, 3), labels(t, 18, 4).view(2, 3, 3)),
    lambda t: F.mse_loss(t(3, 4), t(3, 4), reduction="none"),
    lambda t: F.mse_loss(t(3, 4), t(3, 4), reduction="mean"),
    lambda t: F.mse_loss(t(3, 4), t(3, 4), reduction="sum"),
    lambda t: F.huber_loss(t(3, 4), t(3, 4), reduction="none"),
    lambda t: F.huber_loss(t(3, 4), t(3, 4), reduction="mean"),
    lambda t: F.huber_loss(t(3, 4), t(3, 4), reduction="sum"),
    lambda t: F.smooth_l1_loss(t(3, 4), t(3, 4), reduction="none"),
    lambda t: F.smooth_l1_loss(t(3, 4), t(3, 4), reduction="mean"),
    lambda t: F.smooth_l1_loss(t(3, 4), t(3, 4), reduction="sum"),
    lambda t: F.soft_margin_loss(t(3, 4), t(3, 4).sign(), reduction="none"),
    lambda t: F.soft_margin_loss(t(3, 4), t(3, 4).sign(), reduction="mean"),
    lambda t: F.soft_margin_loss(t(3, 4), t(3, 4).sign(), reduction="sum"),
    lambda t: F.binary_cross_entropy(unit(t, 3, 4), unit(t, 3, 4), reduction="none"),
    lambda t: F.binary_cross_entropy(unit(t, 3, 4), unit(t, 3, 4), reduction="mean"),
    lambda t: F.binary_cross_entropy(unit(t, 3, 4), unit(t, 3, 4), reduction="sum"),
    lambda t: F.multi_margin_loss(t(3, 4), labels(t, 3, 4), reduction="none"),
    lambda t: F.multi_margin_loss(t(3, 4), labels(t, 3, 4), reduction="mean"),
    lambda t: F.multi_margin_loss(t(3, 4), labels(t, 3, 4), reduction="sum"),
)
NORMS: tuple[Program, ...] = (
    lambda t: F.batch_norm(t(4, 3, 5), None, None, training=True),
    lambda t: F.batch_norm(t(4, 3, 5), t(3), t(3).abs() + 1, t(3), t(3), training=True),
    lambda t: F.batch_norm(t(4, 3), t(3), t(3).abs() + 1),
)
PROGRAMS = (
    *POINTWISE, *PRODUCTS, *REDUCTIONS, *LOOK_UPS, *IMAGES, *LOSSES, *NORMS,
)  # fmt: skip


def labels(t: Values, count: int, classes: int) -> Tensor:
    """Give int64 numbers below `classes`, where the values are."""
    return torch.arange(1, count + 1, device=t(1).device) * 5 % classes


def unit(t: Values, *sizes: int) -> Tensor:
    """Give values between 0 and 1."""
    return t(*sizes).sigmoid()


def watch(device: str, dtypes: tuple[torch.dtype, ...], collector: Collector) -> None:
    """Run all programs in all dtypes that they take, and their backward, under `Watch`."""
    torch.manual_seed(0)
    for dtype in dtypes:
        trains = dtype.is_floating_point or dtype.is_complex

        def values(*sizes: Any, dtype: torch.dtype = dtype, trains: bool = trains) -> Tensor:
            made = torch.randn(
                *sizes, device=device, dtype=torch.complex128 if dtype.is_complex else torch.float64
            )
            return (made * (1 if trains else 5)).to(dtype).requires_grad_(trains)

        for program in PROGRAMS:
            _run(program, values, Watch(device, collector))


def _run(program: Program, values: Values, watch: Watch) -> None:
    with watch:
        try:
            results = program(values)
            results = [results] if isinstance(results, Tensor) else results
            for root in torch.utils._pytree.tree_leaves(results):
                if root.requires_grad:
                    torch.autograd.backward(root, torch.randn_like(root))
        except Exception:
            pass  # not for this dtype
