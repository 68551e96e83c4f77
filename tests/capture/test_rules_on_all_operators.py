"""Every rule beside every operator that PyTorch's own samples come to, forward and backward."""

from collections import Counter
from typing import Any

import pytest
import torch
from operator_cases import Case, cases
from operator_exceptions import is_run
from operators import database
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ort.pytorch.graph_compat import schema
from torch_ort.rules import shape_rules
from torch_ort.rules.forms import NoRule, Spec, spec_of

pytestmark = pytest.mark.slow
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
LAYOUTS = ("as given", "transposed", "strided")
MAX_SAMPLES = 12


def strides_that_count(sizes: Any, strides: Any) -> list[int]:
    return [stride for size, stride in zip(sizes, strides, strict=True) if size != 1]


class Compares(TorchDispatchMode):
    """Runs operators, and asks their rules what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.right: Counter[str] = Counter()
        self.wrong: dict[str, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # What writes into its arguments never comes to a rule.
        rule = None if schema(func).is_mutable else shape_rules.find(func)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if rule is None or any(x.layout != torch.strided for x in tensors):
            return func(*args, **kwargs)
        given = pytree.tree_map_only(torch.Tensor, spec_of, (args, kwargs))
        real = func(*args, **kwargs)
        try:
            told = rule(*given[0], **given[1])
        except NoRule:
            return real
        told = pytree.tree_leaves(told, is_leaf=lambda x: isinstance(x, Spec) or x is None)
        want = pytree.tree_leaves(real, is_leaf=lambda x: x is None)
        if len(told) == len(want) and all(map(self.is_right, told, want)):
            self.right[str(func)] += 1
        else:
            self.wrong[str(func)] = (given, told, [x if x is None else spec_of(x) for x in want])
        return real

    @staticmethod
    def is_right(told: Spec | None, real: torch.Tensor | None) -> bool:
        if told is None or real is None:
            return told is None and real is None
        if list(told.sizes) != list(real.shape) or told.dtype != real.dtype:
            return False
        return not real.numel() or (
            strides_that_count(real.shape, told.strides)
            == strides_that_count(real.shape, real.stride())
        )


def run(case: Case) -> None:
    result = case.function(*case.fresh())
    wanted = [
        x
        for x in pytree.tree_leaves(result)
        if isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()
    ]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])


def test_rules_say_what_operators_do():
    pytest.importorskip("expecttest", reason="torch.testing's samples need it")
    mode = Compares()
    for op in database():
        for dtype in DTYPES:
            if not op.supports_dtype(dtype, "cpu"):
                continue
            for case in filter(is_run, cases(op, dtype, LAYOUTS, MAX_SAMPLES)):
                try:
                    with mode:
                        run(case)
                except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
                    continue  # not of the rules: some samples are no calls of a single kind
    assert mode.wrong == {}
    assert sum(mode.right.values()) > 100_000
    assert len(mode.right) > 200
