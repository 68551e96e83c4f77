"""The table of shape rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ort.rules.forms import Spec, empty, spec_of

Rule = Callable[..., Any]


RULES: dict[Any, Rule] = {}


def rule_of(*operators: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some operators."""

    def register(rule: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = rule
        return rule

    return register


def rule_of_ours(name: str) -> Callable[[Rule], Rule]:
    """Register the rule of an operator of the engine's, as its fake kernel too."""

    def register(rule: Rule) -> Rule:
        def fake(*args: Any) -> Any:
            given = [spec_of(each) if isinstance(each, torch.Tensor) else each for each in args]
            made = rule(*given)
            return empty(made) if isinstance(made, Spec) else tuple(map(empty, made))

        torch.library.register_fake(f"torch_ort::{name}", fake)
        return rule_of(getattr(torch.ops.torch_ort, name).default)(rule)

    return register
