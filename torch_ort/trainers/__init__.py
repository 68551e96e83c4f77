"""Trainers with the interface of ONNX Runtime Training, which train a model step by step.

`trainer` takes an optimizer that the caller has made. `v0` and `v1` have the two generations of
`ORTTrainer`.
"""

from torch_ort.onnxruntime_training.trainers.live import Trainer, trainer

__all__ = ["Trainer", "trainer"]
