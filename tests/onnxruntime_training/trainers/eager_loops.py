# Models, batches and training loops in eager PyTorch, which the trainers are compared with.
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    # A bias before the norm would have noise for gradients, which Adam makes steps of.
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3)
    )


def batches(count: int = 6) -> list[Batch]:
    numbers = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8 + i, 6, generator=numbers), torch.randint(3, (8 + i,), generator=numbers))
        for i in range(count)
    ]


class WithLoss(nn.Module):
    """Gives loss and logits, or the logits alone where there are no labels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        if scale is not None:
            logits = logits * scale
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Lamb(torch.optim.Optimizer):
    """LAMB as its paper has it, with the corrections that ONNX Runtime Training's v0 makes."""

    def __init__(self, params: Iterable, corrected: bool, **settings: float) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
        super().__init__(params, {**defaults, **settings})
        self.corrected = corrected

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["t"] = t = state.get("t", 0) + 1
                state["m"] = m = beta1 * state.get("m", 0) + (1 - beta1) * p.grad
                state["v"] = v = beta2 * state.get("v", 0) + (1 - beta2) * p.grad**2
                if self.corrected:
                    m, v = m / (1 - beta1**t), v / (1 - beta2**t)
                r = m / (v.sqrt() + eps) + group["weight_decay"] * p
                ratio = p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1.0
                p.sub_(group["lr"] * ratio * r)


def make_optimizer(name: str, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """Give what a name of ONNX Runtime Training stands for, in PyTorch alone."""
    params = [it for it in model.parameters() if it.requires_grad]
    if name == "SGDOptimizer":
        return torch.optim.SGD(params, lr=1.0)
    if name == "AdamOptimizer":
        decay = {"weight_decay": 0.0, **settings}
        return torch.optim.AdamW(params, lr=1.0, eps=1e-8, **decay)
    return Lamb(params, lr=1.0, **{"corrected": True, **settings})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: Callable[[int], float],
    data: Iterable[Batch],
    *,
    accumulation: int = 1,
    max_norm: float | None = None,
    scale: float | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Train on batches; give loss and prediction of each.

    `lr` gives the rate by the number of updates. With a `scale` the model runs in float16 under
    autocast, and gradients come from a scaled loss.
    """
    results, updates = [], 0
    for i, (x, y) in enumerate(data, 1):
        with torch.autocast("cpu", torch.float16, enabled=scale is not None):
            prediction = model(x)
            loss = F.cross_entropy(prediction, y)
        (loss * (scale or 1) / accumulation).backward()
        results.append((loss.detach(), prediction.detach()))
        if i % accumulation == 0:
            grads = [it.grad for it in model.parameters() if it.grad is not None]
            for grad in grads:
                grad.div_(scale or 1)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr(updates)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return results
