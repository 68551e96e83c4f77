"""The numbers of dtypes in ONNX."""

from __future__ import annotations

import torch

# The numbers of onnx.TensorProto.DataType.
_NUMBERS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.uint16: 4, torch.int16: 5,
    torch.int32: 6, torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.float64: 11,
    torch.uint32: 12, torch.uint64: 13, torch.complex64: 14, torch.complex128: 15,
    torch.bfloat16: 16, torch.float8_e4m3fn: 17, torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19, torch.float8_e5m2fnuz: 20,
}  # fmt: skip
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}


def dtype_number(dtype: torch.dtype) -> int:
    """Give the number that ONNX has for a dtype; 0 if it has none."""
    return _NUMBERS.get(dtype, 0)


def dtype_of_number(number: int) -> torch.dtype | None:
    """Give the dtype that has a number in ONNX; None if PyTorch has none."""
    return _DTYPES.get(number)
