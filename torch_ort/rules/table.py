"""The table of shape rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]


RULES: dict[Any, Rule] = {}


def rule_of(*operators: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some operators."""

    def register(rule: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = rule
        return rule

    return register
