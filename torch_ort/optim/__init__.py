"""Optimizers whose step reads and writes memory once.

`SGD`, `Adam` and `AdamW` are those of `torch.optim` again. `FusedAdam`, `Lamb` and `LambConfig`
are those of ONNX Runtime Training; their steps also take back a loss scale, look for infinities and
clip by the global norm. `FP16_Optimizer` speeds up the checks of other libraries' optimizers.
"""

from torch_ort.optim.as_torch import SGD, Adam, AdamW
from torch_ort.optim.configs import LambConfig
from torch_ort.optim.fp16_optimizer import FP16_Optimizer
from torch_ort.optim.fused_adam import AdamWMode, FusedAdam
from torch_ort.optim.lamb import Lamb

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AdamWMode",
    "FP16_Optimizer",
    "FusedAdam",
    "Lamb",
    "LambConfig",
]
