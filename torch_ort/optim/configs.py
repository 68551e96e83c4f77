"""Optimizers as ONNX Runtime Training describes them: settings, and parameters by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torch_ort.optim.lamb import Lamb
from torch_ort.optim.scaled_step import Group

# What Lamb calls the settings that a group may have of its own.
_OF_LAMB = {
    "lambda_coef": "weight_decay",
    "epsilon": "eps",
    "ratio_min": "ratio_min",
    "ratio_max": "ratio_max",
    "do_bias_correction": "bias_correction",
}


class LambConfig:
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

    name = "LambOptimizer"

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
        self.defaults = {
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
        self.params = [self._checked(group) for group in params]
        vars(self).update(self.defaults)

    @staticmethod
    def _checked(group: Group) -> Group:
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"LambConfig: params: got {names!r}, want a list of names")
        known = {"params", "alpha", "beta", *_OF_LAMB}
        for setting in group.keys() - known:
            raise ValueError(
                f"LambConfig: group: got {setting!r}, want some of {', '.join(sorted(known))}"
            )
        return group

    def optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Lamb:
        """Make the optimizer of these parameters.

        Raises ValueError if a group names a parameter that is not there, or two name the same one.
        """
        others = dict(named_parameters)
        groups = []
        for group in self.params:
            for name in group["params"]:
                if name not in others:
                    raise ValueError(
                        f"LambConfig: params: got {name!r}, want a parameter of no other group"
                    )
            params = [others.pop(name) for name in group["params"]]
            groups.append({"params": params, **self._settings({**self.defaults, **group})})
        if others or not groups:
            groups.append({"params": list(others.values())})
        settings = self._settings(self.defaults)
        settings["max_norm"] = self.defaults["max_norm_clip"]
        return Lamb(groups, lr=self.defaults["lr"], **settings)

    @staticmethod
    def _settings(of: Group) -> dict[str, Any]:
        renamed = {new: of[old] for old, new in _OF_LAMB.items()}
        return {"betas": (of["alpha"], of["beta"]), **renamed}
