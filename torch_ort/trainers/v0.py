"""The first ORTTrainer: descriptions as objects, the optimizer named by a string."""

from torch_ort.onnxruntime_training.trainers.v0 import (
    IODescription,
    LossScaler,
    ModelDescription,
    ORTTrainer,
    load_checkpoint,
    save_checkpoint,
)

__all__ = [
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "load_checkpoint",
    "save_checkpoint",
]
