"""The numbers of dtypes in ONNX."""

from __future__ import annotations

from typing import Any

import torch

from torch_ort._C import Unsupported

# The numbers of onnx.TensorProto.DataType.
_NUMBERS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.uint16: 4, torch.int16: 5,
    torch.int32: 6, torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.float64: 11,
    torch.uint32: 12, torch.uint64: 13, torch.complex64: 14, torch.complex128: 15,
    torch.bfloat16: 16,
}  # fmt: skip


def dtype_number(dtype: torch.dtype) -> int:
    """Give the number that ONNX has for a dtype; 0 if it has none."""
    return _NUMBERS.get(dtype, 0)


def torch_dtype(dtype: Any) -> torch.dtype:
    """Read a dtype that may be ONNX's number for it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = [known for known, number in _NUMBERS.items() if number == int(dtype)]
    if not found:
        raise Unsupported(f"infer_shape: got the dtype {dtype!r}, want one of ONNX or PyTorch")
    return found[0]
