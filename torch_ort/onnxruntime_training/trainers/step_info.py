"""What learning-rate schedules and loss scalers are told about the current step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainStepInfo:
    """Where training is.

    Args:
        optimizer_config: The description of the optimizer.
        all_finite: Whether all gradients of the last update were finite.
        fetches: Names of the outputs that the next steps give; all if there are none.
        optimization_step: How many updates there were.
        step: How many calls of `train_step`.
    """

    optimizer_config: Any
    all_finite: bool = True
    fetches: list[str] = field(default_factory=list)
    optimization_step: int = 0
    step: int = 0
