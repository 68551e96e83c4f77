"""Schedules of the second ORTTrainer for learning rates; users derive theirs from `LRScheduler`."""

from torch_ort.onnxruntime_training.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    LRScheduler,
    PolyWarmupLRScheduler,
)

__all__ = [
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
]
