"""ORTModule, the successor of ONNX Runtime Training's: one line puts a module into the engine."""

from torch_ort.core.log_level import LogLevel
from torch_ort.core.policy import (
    FallbackPolicy,
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.graph_optimizers import (
    register_graph_optimizer,
    unregister_graph_optimizer,
)
from torch_ort.ortmodule.hierarchical import HierarchicalORTModule
from torch_ort.ortmodule.json_config import load_from_json
from torch_ort.ortmodule.module import ORTModule
from torch_ort.ortmodule.module_with_loss import ModuleWithLoss

__all__ = [
    "DebugOptions",
    "FallbackPolicy",
    "HierarchicalORTModule",
    "LogLevel",
    "ModuleWithLoss",
    "ORTModule",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
    "load_from_json",
    "register_graph_optimizer",
    "unregister_graph_optimizer",
]
