"""Objects that train a model step by step, as ONNX Runtime Training had them."""

from torch_ort.trainers.live import Trainer, trainer

__all__ = ["Trainer", "trainer"]
