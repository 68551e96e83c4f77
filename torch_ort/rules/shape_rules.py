"""Shape rules: sizes, strides and dtype of an operator's results from those of its arguments.

PyTorch knows all of this itself, and `Recorder` asks it for operators that have no rule here. Rules
are for the operators that training graphs are made of: they take a tenth of the time, and decide of
symbolic sizes what the engine wants decided. A test runs every rule beside the real operator.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_ort.pytorch.graph_compat import schema
from torch_ort.rules import (
    creation,
    images,
    losses,
    parts,
    products,
    recurrent,
    reductions,
    sparse,
    views,
)
from torch_ort.rules.pointwise import pointwise
from torch_ort.rules.table import RULES, Rule

# Importing these modules adds their rules to the table.
FAMILIES = (creation, images, losses, parts, products, recurrent, reductions, sparse, views)


def find(operator: Any) -> Rule | None:
    """Give the rule of an operator: it takes the operator's arguments, tensors as `Spec`s.

    It gives a Spec, or a tuple or list of Specs (and None) as the operator gives tensors; it raises
    NoRule where PyTorch has to be asked.
    """
    rule = RULES.get(operator)
    if rule is None and torch.Tag.pointwise in operator.tags and _gives_one_tensor(operator):
        rule = RULES[operator] = functools.partial(pointwise, operator)
    return rule


def _gives_one_tensor(operator: Any) -> bool:
    return [str(returned.type) for returned in schema(operator).returns] == ["Tensor"]
