"""Learning-rate schedules by number of updates, with the interface of ONNX Runtime Training.

A scheduler has no state: `get_lr(train_step_info)` gives the rate of the update that comes, from
`train_step_info.optimization_step`, the number of updates before it, and
`train_step_info.optimizer_config.lr`, the rate that is meant without a schedule.
"""

from __future__ import annotations

import math
from typing import Any


class LRScheduler:
    """Base class of schedules; a subclass defines `get_lr`."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: Any) -> list[float]:
        """Give the learning rate of the next update, alone in a list."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Give the learning rate of the last update, alone in a list; nothing before the first."""
        return self._last_lr

    def step(self, train_step_info: Any) -> float:
        """Give the learning rate of the next update as a number, and keep it.

        Raises ValueError where `get_lr` gives anything but one number in a list.
        """
        found = self.get_lr(train_step_info)
        if not isinstance(found, list | tuple) or len(found) != 1:
            raise ValueError(f"{type(self).__name__}: get_lr: got {found!r}, want one number [lr]")
        self._last_lr = [float(found[0])]
        return self._last_lr[0]


class _Warmup(LRScheduler):
    """A rate that grows from 0 in a straight line first.

    Args:
        total_steps: number of updates of the whole run.
        warmup: the part of them in which the rate grows. After `s` updates of these it is
            `s / (warmup * total_steps)` of the full one.

    Raises:
        ValueError: `total_steps` is less than 1, or `warmup` not from 0 to less than 1.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"{name}: total_steps: got {total_steps!r}, want at least 1")
        if not 0 <= warmup < 1:
            raise ValueError(f"{name}: warmup: got {warmup!r}, want 0 or more and less than 1")
        self.total_steps = total_steps
        self.warmup = warmup

    def get_lr(self, train_step_info: Any) -> list[float]:
        """Give the learning rate of the next update, alone in a list."""
        full, step = train_step_info.optimizer_config.lr, train_step_info.optimization_step
        steps = self.warmup * self.total_steps
        if step < steps:
            return [full * step / steps]
        return [full * self._factor(step - steps, self.total_steps - steps, full)]

    def _factor(self, step: float, steps: float, full: float) -> float:
        """Give the factor after `step` of the `steps` updates behind the warm-up."""
        raise NotImplementedError


class ConstantWarmupLRScheduler(_Warmup):
    """Warm-up, then the full rate.

    Arguments and errors: `total_steps`, the number of updates of the whole run, and `warmup`, the
    part of them in which the rate grows from 0 in a straight line; ValueError out of range.
    """

    def _factor(self, step: float, steps: float, full: float) -> float:
        return 1.0


class LinearWarmupLRScheduler(_Warmup):
    """Warm-up, then a straight line to 0 after `total_steps` updates.

    Arguments and errors: those of `ConstantWarmupLRScheduler`.
    """

    def _factor(self, step: float, steps: float, full: float) -> float:
        return max(0.0, 1 - step / steps)


class CosineWarmupLRScheduler(_Warmup):
    """Warm-up, then `(1 + cos(2 pi cycles x)) / 2`, where x goes from 0 to 1 until `total_steps`.

    Args:
        total_steps: number of updates of the whole run.
        cycles: periods of the cosine; half of one ends at 0.
        warmup: the part of the updates in which the rate grows from 0 in a straight line.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not cycles > 0:
            raise ValueError(f"CosineWarmupLRScheduler: cycles: got {cycles!r}, want more than 0")
        self.cycles = cycles

    def _factor(self, step: float, steps: float, full: float) -> float:
        return max(0.0, (1 + math.cos(2 * math.pi * self.cycles * step / steps)) / 2)


class PolyWarmupLRScheduler(_Warmup):
    """Warm-up, then `lr_end + (lr - lr_end) (1 - x)^power`, where x goes from 0 to 1.

    Args:
        total_steps: number of updates of the whole run; later ones have `lr_end`.
        lr_end: the last learning rate, less than the full one.
        power: 1 for a straight line.
        warmup: the part of the updates in which the rate grows from 0 in a straight line.

    Raises:
        ValueError: a number is out of its range; `lr_end` of the full rate when one is asked for.
    """

    def __init__(
        self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        if not lr_end >= 0:
            raise ValueError(f"PolyWarmupLRScheduler: lr_end: got {lr_end!r}, want 0 or more")
        if not power > 0:
            raise ValueError(f"PolyWarmupLRScheduler: power: got {power!r}, want more than 0")
        self.lr_end = lr_end
        self.power = power

    def _factor(self, step: float, steps: float, full: float) -> float:
        if not self.lr_end < full:
            raise ValueError(
                f"PolyWarmupLRScheduler: lr_end: got {self.lr_end}, want less than lr, {full}"
            )
        left = max(0.0, 1 - step / steps) ** self.power
        return (self.lr_end + (full - self.lr_end) * left) / full
