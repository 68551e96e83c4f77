"""Optimizers as ONNX Runtime Training describes them: settings, and parameters by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_ort.optim.as_torch import SGD
from torch_ort.optim.fused_adam import AdamWMode, FusedAdam
from torch_ort.optim.lamb import Lamb
from torch_ort.optim.scaled_step import Group

# The names here of settings that a group may have; `alpha` and `beta` become `betas`.
_OF_GROUPS = {
    "lambda_coef": "weight_decay",
    "epsilon": "eps",
    "ratio_min": "ratio_min",
    "ratio_max": "ratio_max",
    "do_bias_correction": "bias_correction",
}


class OptimizerConfig:
    """An optimizer's name, its settings, and groups of parameters with settings of their own.

    Each setting is an attribute as well.

    Args:
        name: "SGDOptimizer", "AdamOptimizer" or "LambOptimizer".
        params: groups, each a dict with a list of names at "params" and settings of its own. Other
            parameters have the settings of `defaults`.
        defaults: settings by name, "lr" among them.

    Raises:
        ValueError: the name is another one, there is no "lr", or a group has no list of names or
            names a setting that no group can have.
    """

    made_by: ClassVar[dict[str, type[torch.optim.Optimizer]]] = {
        "SGDOptimizer": SGD,
        "AdamOptimizer": FusedAdam,
        "LambOptimizer": Lamb,
    }

    def __init__(self, name: str, params: Iterable[Group], defaults: Group) -> None:
        kind = type(self).__name__
        if name not in self.made_by:
            raise ValueError(f"{kind}: name: got {name!r}, want one of {', '.join(self.made_by)}")
        if "lr" not in defaults:
            raise ValueError(f"{kind}: defaults: got no 'lr', want a learning rate")
        self.name = name
        self.defaults = dict(defaults)
        self.params = [self._checked(group) for group in params]
        vars(self).update(self.defaults)

    def _checked(self, group: Group) -> Group:
        kind = type(self).__name__
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{kind}: params: got {names!r}, want a list of names")
        known = {"params", *(self.defaults.keys() & {"alpha", "beta", *_OF_GROUPS})}
        for setting in sorted(group.keys() - known):
            raise ValueError(
                f"{kind}: group: got {setting!r}, want some of {', '.join(sorted(known))}"
            )
        return group

    def groups(self, named_parameters: Iterable[tuple[str, Tensor]]) -> list[Group]:
        """Give the groups as the optimizer takes them: its names of settings, and tensors.

        Raises ValueError if a group names a parameter that is not there, or two name the same one.
        """
        others = dict(named_parameters)
        groups = []
        for group in self.params:
            for name in group["params"]:
                if name not in others:
                    raise ValueError(
                        f"{type(self).__name__}: params: got {name!r}, want a parameter of no "
                        "other group"
                    )
            params = [others.pop(name) for name in group["params"]]
            groups.append({"params": params, **self._settings({**self.defaults, **group})})
        if others or not groups:
            groups.append({"params": list(others.values())})
        return groups

    def settings(self) -> dict[str, Any]:
        """Give the keyword arguments of the optimizer's class, for parameters of no group."""
        return {"lr": self.defaults["lr"], **self._settings(self.defaults)}

    def optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """Make the optimizer of these parameters.

        Raises ValueError if a group names a parameter that is not there, or two name the same one.
        """
        made = self.made_by[self.name](self.groups(named_parameters), **self.settings())
        if "max_norm_clip" in self.defaults:
            made.limit_norm(self.defaults["max_norm_clip"])
        return made

    @staticmethod
    def _settings(of: Group) -> dict[str, Any]:
        renamed = {new: of[old] for old, new in _OF_GROUPS.items() if old in of}
        return renamed | ({"betas": (of["alpha"], of["beta"])} if "alpha" in of else {})


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent; all parameters have the same settings.

    Args:
        params: has to be empty.
        lr: learning rate.

    Raises:
        ValueError: `params` has groups.
    """

    def __init__(self, params: Iterable[Group] = (), lr: float = 0.001) -> None:
        params = list(params)
        if params:
            raise ValueError(f"SGDConfig: params: got {len(params)} groups, want none")
        super().__init__("SGDOptimizer", params, {"lr": lr})


class AdamConfig(OptimizerConfig):
    """The settings of `FusedAdam` under the names of ONNX Runtime Training's `AdamConfig`.

    Args:
        params: groups, each a dict with a list of names at "params" and settings of its own. Other
            parameters have the settings below.
        lr: learning rate, of all groups.
        alpha: how much of the running mean of the gradient a step keeps.
        beta: how much of the running mean of its square a step keeps.
        lambda_coef: weight decay.
        epsilon: keeps the quotient finite.
        max_norm_clip: limit of the norm of all gradients, for all groups.
        do_bias_correction: whether the means are corrected for having begun at 0.
        weight_decay_mode: whether the decay acts before the update, as in `torch.optim.AdamW`, or
            after it, as in `transformers.AdamW`; for all groups.

    Raises:
        ValueError: a group has no list of names, or names a setting that no group can have; there
            is no such mode.
    """

    class DecayMode(IntEnum):
        """Where the weight decay acts."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: Iterable[Group] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": self.DecayMode(weight_decay_mode),
        }
        super().__init__("AdamOptimizer", params, defaults)

    def settings(self) -> dict[str, Any]:
        """Give the keyword arguments of `FusedAdam`, for parameters of no group."""
        is_before = self.defaults["weight_decay_mode"] is self.DecayMode.BEFORE_WEIGHT_UPDATE
        mode = AdamWMode.ADAMW_TORCH if is_before else AdamWMode.ADAMW_TRANSFORMERS
        return {**super().settings(), "adam_w_mode": mode}


class LambConfig(OptimizerConfig):
    """The settings of `Lamb` under the names of ONNX Runtime Training's `LambConfig`.

    `name` is "LambOptimizer", `defaults` has the settings, and each is an attribute as well.

    Args:
        params: groups, each a dict with a list of names at "params" and settings of its own. Other
            parameters have the settings below.
        lr: learning rate, of all groups.
        alpha: how much of the running mean of the gradient a step keeps.
        beta: how much of the running mean of its square a step keeps.
        lambda_coef: weight decay.
        ratio_min: least ratio of the norms of a parameter and of its direction.
        ratio_max: largest ratio.
        epsilon: keeps the quotient finite.
        max_norm_clip: limit of the norm of all gradients, for all groups.
        do_bias_correction: whether the means are corrected for having begun at 0.

    Raises:
        ValueError: a group has no list of names, or names a setting that no group can have.
    """

    def __init__(
        self,
        params: Iterable[Group] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__("LambOptimizer", params, defaults)
