"""Loss scalers of the second ORTTrainer; classes of users derive from `LossScaler`."""

from torch_ort.onnxruntime_training.trainers.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
