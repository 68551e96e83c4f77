"""Samplers that give all ranks the same amount of work at each step (docs/samplers.md)."""

from torch_ort.onnxruntime_training.samplers.sampler import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from torch_ort.onnxruntime_training.samplers.token_budget import (
    TokenBudgetBatchSampler,
    TokenBudgetPacker,
)

__all__ = [
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "TokenBudgetBatchSampler",
    "TokenBudgetPacker",
]
