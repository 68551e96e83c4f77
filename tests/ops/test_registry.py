"""Rows of PyTorch's operators."""

from __future__ import annotations

import torch

from torch_ort import _C

# Calls that engine and lowerings know by name, and which no dispatcher does.
NAMES_OF_FORMS = {"torch_ort::bernoulli_mask", "torch_ort::random_seed"}


def test_rows_are_of_registered_operators() -> None:
    names = set(_C.testing.operator_names()) - NAMES_OF_FORMS
    unknown = [name for name in names if not torch._C._jit_get_schemas_for_operator(name)]
    assert not unknown
    assert "aten::convolution_backward" in names
