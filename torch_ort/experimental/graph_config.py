"""Options to move casts through the graph, which are accepted and change nothing."""

from torch_ort.onnxruntime_training.experimental.graph_config import (
    PropagateCastLevel,
    PropagateCastOpsStrategy,
    set_propagate_cast_ops_optimization,
)

__all__ = [
    "PropagateCastLevel",
    "PropagateCastOpsStrategy",
    "set_propagate_cast_ops_optimization",
]
