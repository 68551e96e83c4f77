"""Trainers with the interface of ONNX Runtime Training, which train a model step by step.

`trainer` takes an optimizer that the caller has made. `v0` and `v1` have the two generations of
`ORTTrainer`. All of them run on core.py.
"""

from torch_ort.trainers.live import Trainer, trainer

__all__ = ["Trainer", "trainer"]
