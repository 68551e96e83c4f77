"""Statistics of activations and gradients, to compare a run of the engine with one in PyTorch."""

from torch_ort.onnxruntime_training.convergence.statistics import StatisticsSubscriber
from torch_ort.onnxruntime_training.convergence.subscription import (
    GlobalSubscriberManager,
    SubscriberBase,
    inspect_activation,
)

__all__ = [
    "GlobalSubscriberManager",
    "StatisticsSubscriber",
    "SubscriberBase",
    "inspect_activation",
]
