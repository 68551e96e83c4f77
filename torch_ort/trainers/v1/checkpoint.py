"""Files of the second ORTTrainer's state."""

from torch_ort.onnxruntime_training.trainers.v1.checkpoint import (
    aggregate_checkpoints,
    experimental_load_checkpoint,
    experimental_load_state_dict,
    experimental_save_checkpoint,
    experimental_state_dict,
)

__all__ = [
    "aggregate_checkpoints",
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
]
