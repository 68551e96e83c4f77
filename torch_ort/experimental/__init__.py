"""Names of the package torch_ort of ONNX Runtime Training, for scripts written for it."""

from torch_ort.core.log_level import LogLevel
from torch_ort.onnxruntime_training.experimental.debug import (
    save_intermediate_onnx_graphs,
    set_log_level,
)
from torch_ort.onnxruntime_training.experimental.graph_config import (
    PropagateCastLevel,
    PropagateCastOpsStrategy,
    set_propagate_cast_ops_optimization,
)
from torch_ort.ortmodule import load_from_json

__all__ = [
    "LogLevel",
    "PropagateCastLevel",
    "PropagateCastOpsStrategy",
    "load_from_json",
    "save_intermediate_onnx_graphs",
    "set_log_level",
    "set_propagate_cast_ops_optimization",
]
