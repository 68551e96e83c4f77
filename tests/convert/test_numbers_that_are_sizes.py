# Where a call has a size in the place of a number that a standard node would have to know.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion import NEWEST, check, floats
from torch.nn import functional as F

X = floats(3, 3)
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, x.shape[0]),
    "elu": lambda x: F.elu(x, x.shape[0]),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, x.shape[0], 1),
    "addmm": lambda x: torch.addmm(x, x, x, alpha=x.shape[0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_stays_as_it_is(name: str):
    check(CALLS[name], X, ops=[f"aten::{name}"], dynamic=True, pins=(NEWEST,))
