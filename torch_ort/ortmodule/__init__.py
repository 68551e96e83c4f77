"""ORTModule, the successor of ONNX Runtime Training's: one line puts a module into the engine."""

from torch_ort.ortmodule.debug_options import DebugOptions, LogLevel
from torch_ort.ortmodule.module import ORTModule
from torch_ort.ortmodule.policy import (
    FallbackPolicy,
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)

__all__ = [
    "DebugOptions",
    "FallbackPolicy",
    "LogLevel",
    "ORTModule",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
]
