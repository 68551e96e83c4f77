"""Sizes and dtypes for tests of losses of linear layers that are made in chunks."""

from __future__ import annotations

import pytest
import torch

# Just enough logits for the pass: 40 MB of bfloat16.
ROWS, WIDTH, CLASSES = 4000, 8, 5000
# By dtype, how near to float64 norms are. The layer before the head rounds as well.
NEAR = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1.5e-2, torch.float16: 5e-3}
USUAL = (torch.float32, torch.bfloat16)
DTYPES = [pytest.param(x, marks=() if x in USUAL else pytest.mark.slow, id=str(x)) for x in NEAR]
