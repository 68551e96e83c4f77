"""oneDNN's product of float32, of a library that is installed, and eager PyTorch with it.

PyTorch multiplies float32 with MKL, which is far from the peak of some processors. What a backend
gains beyond eager PyTorch with oneDNN's products is not that library's weakness.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


class OneDnn:
    """`dnnl_sgemm` of a library such as libdnnl.so.2, on threads of its own.

    Raises OSError if there is no such library.
    """

    def __init__(self, path: str) -> None:
        size, number, data = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        self._call = ctypes.CDLL(path).dnnl_sgemm
        self._call.argtypes = [
            ctypes.c_char, ctypes.c_char, size, size, size, number, data, size, data, size, number,
            data, size,
        ]  # fmt: skip

    def product(
        self, result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, start: float = 0.0
    ) -> Callable[[], Any]:
        """Give what computes result <- start * result + a * b, for a row-major result.

        Each factor, of shapes [m, k] and [k, n], has contiguous rows or columns.
        """
        (left, a_row), (right, b_row) = map(self._layout, (a, b))
        m, n = result.shape
        args = (
            left, right, m, n, a.shape[1], 1.0, a.data_ptr(), a_row, b.data_ptr(), b_row, start,
            result.data_ptr(), n,
        )  # fmt: skip
        return lambda: self._call(*args)

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        """Whether this is a matrix of float32 with contiguous rows or columns."""
        is_matrix = x.dtype == torch.float32 and x.ndim == 2 and x.numel() > 0
        return is_matrix and (x.stride(1) == 1 or x.stride(0) == 1)

    @staticmethod
    def _layout(x: torch.Tensor) -> tuple[bytes, int]:
        rows, columns = x.shape
        if x.stride(1) == 1:
            return b"N", max(x.stride(0), columns)
        return b"T", max(x.stride(1), rows)


def replace_products(library: OneDnn) -> torch.library.Library:
    """Have oneDNN compute PyTorch's products of two matrices of float32, `mm` and `addmm`.

    They are called from Python, which costs some microseconds each. Lasts as long as the result.
    """
    ours = torch.library.Library("aten", "IMPL")
    mm, addmm = torch.ops.aten.mm.out, torch.ops.aten.addmm.out

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
        if library.takes(a) and library.takes(b):
            library.product(result, a, b)()
            return result
        return mm(a, b, out=result)

    def add_product(
        start: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
    ) -> torch.Tensor:
        result = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
        if alpha == beta == 1 and library.takes(a) and library.takes(b):
            library.product(result.copy_(start), a, b, 1.0)()
            return result
        return addmm(start, a, b, beta=beta, alpha=alpha, out=result)

    ours.impl("mm", multiply, "CPU")
    ours.impl("addmm", add_product, "CPU")
    return ours
