"""What the files import that `python -m torch_ort.compat install` has placed, now or earlier."""

from torch_ort.onnxruntime_training.compat.old_names import open_module

__all__ = ["open_module"]
