"""One training step: forward and backward as one graph of the engine, and the update.

All trainers of this package run on it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_ort.onnxruntime_training.trainers.ranks import local_optimizer, spread
from torch_ort.optim.gradients import isa_in_force, norm
from torch_ort.optim.scaled_step import NORM_EPS, ScaledStep
from torch_ort.ortmodule import DebugOptions, ORTModule


class Core:
    """Calls a module through an ORTModule, and updates what an optimizer holds.

    With several ranks of torch.distributed the gradients are averaged over them.

    Args:
        module: Gives a tuple; its first part is the loss, a number without dims.
        optimizer: Holds parameters of the module.
        accumulation: Every so manieth call updates, by the mean of their gradients.
        max_norm: The norm to which all gradients together are clipped before an update.
        autocast: The dtype of mixed precision; None computes in the dtype of the parameters.
        is_deterministic: Whether steps run under `torch.use_deterministic_algorithms(True)`.
        debug_options: Of the ORTModule.

    Raises ValueError for numbers out of range.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        accumulation: int = 1,
        max_norm: float | None = None,
        autocast: torch.dtype | None = None,
        is_deterministic: bool = False,
        debug_options: DebugOptions | None = None,
    ) -> None:
        if accumulation < 1:
            raise ValueError(f"gradient_accumulation_steps: got {accumulation}, want at least 1")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_grad_norm: got {max_norm}, want None or more than 0")
        self.optimizer = optimizer
        self.accumulation = accumulation
        self.max_norm = max_norm
        self.num_calls = 0
        self.num_updates = 0
        self.engine = ORTModule(module, debug_options)
        self._autocast = autocast
        self._is_deterministic = is_deterministic
        self._scales_in_step = isinstance(local_optimizer(optimizer), ScaledStep)
        self._isa = isa_in_force()
        self._runs = spread(self.engine)

    @property
    def _held(self) -> list[Tensor]:
        """The parameters of all groups, those among them that were added since."""
        return [it for group in self.optimizer.param_groups for it in group["params"]]

    @property
    def is_before_update(self) -> bool:
        """Whether the next call updates."""
        return self.num_calls % self.accumulation == self.accumulation - 1

    def step(
        self,
        args: tuple[Any, ...],
        *,
        scale: float | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> tuple[Any, bool | None]:
        """Run forward and backward, and update if it is time; the module's mode stays.

        Args:
            args: Of the module.
            scale: What the loss is multiplied by before backward. The update divides by it, and is
                left out if a gradient is infinite or NaN then. With None there is no such look.
            before_update: Called if this call updates, after backward.

        Returns what the module gave, and whether it updated: None where it was not time.

        Raises ValueError where the first part of the result is no floating number without dims.
        """
        updates = self.is_before_update
        if self.num_calls % self.accumulation == 0:
            self.optimizer.zero_grad()
        with self._exchanging(updates), self._determined():
            with self._casting(args):
                results = self._runs(*args)
            loss = _checked_loss(results[0])
            (loss * ((1.0 if scale is None else scale) / self.accumulation)).backward()
        self.num_calls += 1
        if not updates:
            return results, None
        if before_update is not None:
            before_update()
        has_updated = self._update(scale)
        self.num_updates += has_updated
        return results, has_updated

    def evaluate(self, args: tuple[Any, ...], engine: ORTModule | None = None) -> Any:
        """Call the module, or another one, in evaluation mode and without gradients.

        The modes of all modules inside are put back.
        """
        engine = engine or self.engine
        modes = [(module, module.training) for module in engine.module.modules()]
        engine.eval()
        try:
            with torch.no_grad(), self._determined(), self._casting(args):
                return engine(*args)
        finally:
            for module, mode in modes:
                module.training = mode

    def pending_gradients(self) -> dict[int, Tensor]:
        """Give the gradients that wait for an update, by the `id` of their parameters."""
        if self.num_calls % self.accumulation == 0:
            return {}
        return {id(param): param.grad for param in self._held if param.grad is not None}

    def _update(self, scale: float | None) -> bool:
        """Update, unless a gradient of a scaled loss is infinite or NaN; returns whether it did."""
        grads = [param.grad for param in self._held if param.grad is not None]
        divisor = 1.0 if scale is None else scale
        if scale is not None or self.max_norm is not None:
            if any(grad.layout != torch.strided for grad in grads):
                raise RuntimeError(
                    "trainer: gradients: got a sparse one, want dense ones to scale or clip"
                )
            total = norm(grads, self._isa) / divisor
            if scale is not None and not math.isfinite(total):
                return False
            if self.max_norm is not None:
                divisor = _divided(divisor, self.max_norm / (total + NORM_EPS))
        with torch.no_grad():
            if divisor == 1:
                self.optimizer.step()
            elif self._scales_in_step and math.isfinite(divisor):
                self.optimizer.step(grad_scale=divisor, found_inf=0.0)
            else:
                for grad in grads:
                    grad.div_(divisor)
                self.optimizer.step()
        return True

    def _exchanging(self, updates: bool) -> contextlib.AbstractContextManager:
        """Let ranks exchange gradients at the last call before an update only."""
        if updates or not isinstance(self._runs, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._runs.no_sync()

    def _casting(self, args: tuple[Any, ...]) -> contextlib.AbstractContextManager:
        if self._autocast is None:
            return contextlib.nullcontext()
        held = next((it.device for it in self._held), None)
        given = (it.device for it in args if isinstance(it, Tensor))
        device = held or next(given, torch.device("cpu"))
        return torch.autocast(device.type, self._autocast)

    @contextlib.contextmanager
    def _determined(self) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        if before or not self._is_deterministic:
            yield
            return
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _divided(divisor: float, factor: float) -> float:
    """Give a divisor that also multiplies by a factor, which is 0 for an infinite norm, or NaN.

    As by torch.nn.utils.clip_grad_norm_, gradients are 0 or NaN then.
    """
    if math.isnan(factor):
        return factor
    return divisor / min(1.0, factor) if factor > 0 else math.inf


def _checked_loss(loss: Any) -> Tensor:
    is_tensor = isinstance(loss, Tensor)
    if is_tensor and loss.is_floating_point() and loss.dim() == 0:
        return loss
    found = f"{loss.dtype} {list(loss.shape)}" if is_tensor else type(loss).__name__
    raise ValueError(f"loss: got {found}, want a floating number without dims")
