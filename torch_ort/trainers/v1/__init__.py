"""The second ORTTrainer: descriptions and options as dicts, the optimizer as a config.

ONNX Runtime Training had it as `onnxruntime.training.ORTTrainer`.
"""

from torch_ort.trainers.step_info import TrainStepInfo
from torch_ort.trainers.v1.options import ORTTrainerOptions
from torch_ort.trainers.v1.trainer import ORTTrainer

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]
