"""The switch of ONNX Runtime Training for torch.autograd.Function."""

from torch_ort.onnxruntime_training.compat.custom_autograd import enable_custom_autograd_support

__all__ = ["enable_custom_autograd_support"]
