"""Dtypes as functions give them that say what a function returns."""

from __future__ import annotations

from typing import Any

import torch

from torch_ort._C import Unsupported
from torch_ort.core.dtypes import dtype_of_number


def torch_dtype(dtype: Any) -> torch.dtype:
    """Read a dtype that may be ONNX's number for it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = dtype_of_number(int(dtype))
    if found is None:
        raise Unsupported(f"infer_shape: got the dtype {dtype!r}, want one of ONNX or PyTorch")
    return found
