"""Statistics of activations and their gradients, to compare a run in PyTorch with one of ours."""

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
