"""The second ORTTrainer: descriptions and options as dicts, the optimizer as a config."""

from torch_ort.onnxruntime_training.trainers.step_info import TrainStepInfo
from torch_ort.onnxruntime_training.trainers.v1.options import ORTTrainerOptions
from torch_ort.onnxruntime_training.trainers.v1.trainer import ORTTrainer

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]
