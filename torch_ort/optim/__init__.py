"""Optimizers whose step reads and writes memory once.

`SGD`, `Adam` and `AdamW` are those of `torch.optim` again. `FusedAdam` and `Lamb` are those of ONNX
Runtime Training; their steps also take back a loss scale, look for infinities and clip by the
global norm. `SGDConfig`, `AdamConfig` and `LambConfig` describe them as its trainer wants it, and
`lr_scheduler` has its schedules. `FP16_Optimizer` speeds up the checks of other libraries'
optimizers.
"""

from torch_ort.optim.as_torch import SGD, Adam, AdamW
from torch_ort.optim.configs import AdamConfig, LambConfig, OptimizerConfig, SGDConfig
from torch_ort.optim.fp16_optimizer import FP16_Optimizer
from torch_ort.optim.fused_adam import AdamWMode, FusedAdam
from torch_ort.optim.lamb import Lamb

__all__ = [
    "SGD",
    "Adam",
    "AdamConfig",
    "AdamW",
    "AdamWMode",
    "FP16_Optimizer",
    "FusedAdam",
    "Lamb",
    "LambConfig",
    "OptimizerConfig",
    "SGDConfig",
]
