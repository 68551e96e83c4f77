"""Loss scales for mixed precision, which adapt to overflows of the gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class LossScaler(ABC):
    """Base class of loss scalers.

    Args:
        loss_scale: What the loss is multiplied by; more than 0.

    Raises:
        ValueError: the scale is out of range.
    """

    def __init__(self, loss_scale: float) -> None:
        if not loss_scale > 0:
            raise ValueError(f"loss_scale: got {loss_scale!r}, want more than 0")
        self._initial = float(loss_scale)
        self.loss_scale = float(loss_scale)

    def reset(self) -> None:
        """Go back to the scale of the beginning."""
        self.loss_scale = self._initial

    @abstractmethod
    def update(self, train_step_info: Any) -> float:
        """Give the scale of the next step; `train_step_info.all_finite` tells how this one went."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a scaler can continue, as plain data."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.loss_scale = float(state["loss_scale"])


class DynamicLossScaler(LossScaler):
    """Halves the scale after a step whose gradients overflow, doubles it after many good ones.

    Args:
        automatic_update: Whether `update` changes the scale at all.
        loss_scale: The scale of the beginning.
        up_scale_window: How many good steps in a row double the scale.
        min_loss_scale: The least scale.
        max_loss_scale: The largest one.

    Raises:
        ValueError: a number is out of range, or the scale is not between the limits.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = 65536.0,
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 16777216.0,
    ) -> None:
        super().__init__(loss_scale)
        if up_scale_window < 1:
            raise ValueError(f"up_scale_window: got {up_scale_window}, want at least 1")
        if not min_loss_scale <= loss_scale <= max_loss_scale:
            raise ValueError(
                f"loss_scale: got {loss_scale}, want from {min_loss_scale} to {max_loss_scale}"
            )
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._num_good = 0

    def reset(self) -> None:
        """Go back to the scale of the beginning, and count good steps from 0."""
        super().reset()
        self._num_good = 0

    def update(self, train_step_info: Any) -> float:
        """Give the scale of the next step; `train_step_info.all_finite` tells how this one went."""
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._num_good = 0
            return self.loss_scale
        self._num_good += 1
        if self._num_good >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._num_good = 0
        return self.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Give the scale and the number of good steps."""
        return {**super().state_dict(), "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        super().load_state_dict(state)
        self._num_good = int(state["num_good"])
