"""`DebugOptions` of an ORTModule that exists already."""

from torch_ort.onnxruntime_training.experimental.debug import (
    save_intermediate_onnx_graphs,
    set_log_level,
)

__all__ = ["save_intermediate_onnx_graphs", "set_log_level"]
