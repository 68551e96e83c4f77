"""Optimizers whose step updates all parameters in one call that reads and writes memory once.

`SGD`, `Adam` and `AdamW` have the arguments, formulas and state of those of `torch.optim`.
`FusedAdam` and `Lamb` are those of ONNX Runtime Training; their step can also unscale gradients,
check them for infinities and clip them by their global norm. `SGDConfig`, `AdamConfig` and
`LambConfig` describe optimizers for ORTTrainer, and `lr_scheduler` has its schedules.
`FP16_Optimizer` speeds up the overflow checks of other libraries' optimizers.
"""

from torch_ort.onnxruntime_training.optim.configs import (
    AdamConfig,
    LambConfig,
    OptimizerConfig,
    SGDConfig,
)
from torch_ort.onnxruntime_training.optim.fp16_optimizer import FP16_Optimizer
from torch_ort.optim.as_torch import SGD, Adam, AdamW
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
