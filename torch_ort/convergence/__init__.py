"""Statistics of activations and gradients, to compare a run of the engine with one in PyTorch."""

from torch_ort.convergence.statistics import StatisticsSubscriber
from torch_ort.convergence.subscription import (
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
