"""An optimizer's state by the names of parameters, in the form of ONNX Runtime Training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ort.onnxruntime_training.trainers.ranks import local_optimizer

MOMENTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}
UPDATES = "Update_Count"

States = dict[str, dict[str, Tensor]]


def read(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> States:
    """Give copies of the running means on the CPU, and the number of updates, int64 [1].

    Of a parameter that has not been updated yet there is the number alone. A sharded optimizer
    gives those of its part; an optimizer without state gives nothing.
    """
    local = local_optimizer(optimizer)
    steps = {
        id(param): group.get("step", 0) for group in local.param_groups for param in group["params"]
    }
    if not any(local.state.get(param) for param in named.values()):
        return {}
    found: States = {}
    for name, param in named.items():
        state = local.state.get(param)
        if state:
            moments = {new: state[old].detach().cpu().clone() for new, old in MOMENTS.items()}
            found[name] = {**moments, UPDATES: torch.tensor([steps[id(param)]])}
        elif id(param) in steps:
            found[name] = {UPDATES: torch.tensor([0])}
    return found


def put(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], states: States, strict: bool
) -> None:
    """Let an optimizer go on from what `read` gave.

    A parameter of which that has no moments loses its own. A sharded optimizer takes its part.
    Raises ValueError, if `strict`, for names that the parameters do not have, and for parameters
    that are missing, as are those of other ranks.
    """
    unknown = sorted(states.keys() - named.keys())
    if strict and unknown:
        raise ValueError(f"optimizer: got state of {', '.join(unknown)}, want known parameters")
    local = local_optimizer(optimizer)
    mine = {id(param) for group in local.param_groups for param in group["params"]}
    missing = [name for name, it in named.items() if id(it) in mine and name not in states]
    if strict and states and missing:
        raise ValueError(
            f"optimizer: got no state of {', '.join(missing)}; a sharded state is loaded from the "
            "files of all ranks"
        )
    for name, param in named.items():
        if id(param) not in mine or (states and name not in states):
            continue
        saved = states.get(name, {})
        local.state.pop(param, None)
        if saved.keys() >= MOMENTS.keys():
            local.state[param] = {
                old: saved[new].to(param.device, _dtype(param), copy=True)
                for new, old in MOMENTS.items()
            }
    _count_updates({id(it): it for it in (optimizer, local)}.values(), states)


def _dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _count_updates(optimizers: Any, states: States) -> None:
    # All groups count all updates, even those without a parameter on this rank.
    steps = max((int(state[UPDATES]) for state in states.values()), default=0)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if states or "step" in group:
            group["step"] = steps
