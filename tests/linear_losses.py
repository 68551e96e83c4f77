"""Sizes and dtypes for tests of losses of linear layers that are made in chunks."""

from __future__ import annotations

import torch

# Just enough logits for the pass, which wants to save 32 MiB: 40 MB of float32, or of short floats.
ROWS, WIDTH, CLASSES = 2000, 8, 5000
# By dtype, how near to float64 norms are. The layer before the head rounds as well.
NEAR = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1.5e-2, torch.float16: 5e-3}


def num_rows(dtype: torch.dtype) -> int:
    return ROWS if dtype.itemsize >= 4 else 2 * ROWS
