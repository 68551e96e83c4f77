# The fake libcuda and NVRTC (driver/*.cpp): for code that opens both by path, and for tests.
from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from emulated import build

ORDERS = ("forward", "reverse", "greedy", "greedy-reverse", "random:1")


def library() -> Path:
    """Build the library that stands for libcuda.so.1 and for libnvrtc.so, and give its path.

    Sets what it reads of the environment: EMULATED_CUDA_HEADERS and EMULATED_CUDA_CACHE.
    """
    path = build.driver_library()
    os.environ["EMULATED_CUDA_HEADERS"] = str(build.HERE / "driver")
    os.environ["EMULATED_CUDA_CACHE"] = str(build.CACHE / "kernels")
    return path


class CudaError(Exception):
    """A call of the driver was refused, or an earlier kernel failed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


class Driver:
    """A few calls of the driver and of NVRTC, of the fake ones or of those at given paths."""

    def __init__(self, driver: Path | None = None, nvrtc: Path | None = None) -> None:
        self.cu = ctypes.CDLL(str(driver or library()))
        self.rtc = ctypes.CDLL(str(nvrtc or driver or library()))
        self.check(self.cu.cuInit(0))
        context = ctypes.c_void_p()
        self.check(self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.cu.cuCtxSetCurrent(context))

    def check(self, result: int) -> None:
        """Raise CudaError if a call was refused."""
        if result == 0:
            return
        name, reason = ctypes.c_char_p(), ctypes.c_char_p()
        self.cu.cuGetErrorName(result, ctypes.byref(name))
        self.cu.cuGetErrorString(result, ctypes.byref(reason))
        raise CudaError(name.value.decode(), reason.value.decode())

    def compile(self, text: str, kernel: str) -> ctypes.c_void_p:
        """Compile a text and give one of its kernels.

        Raises CudaError with the compiler's words.
        """
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self.rtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"k.cu", 0, None, None)
        try:
            if self.rtc.nvrtcCompileProgram(program, 0, None):
                self.rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value)
                self.rtc.nvrtcGetProgramLog(program, log)
                raise CudaError("NVRTC_ERROR_COMPILATION", log.value.decode())
            self.rtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
            image = ctypes.create_string_buffer(size.value)
            self.rtc.nvrtcGetCUBIN(program, image)
        finally:
            self.rtc.nvrtcDestroyProgram(ctypes.byref(program))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cu.cuModuleLoadData(ctypes.byref(module), image))
        self.check(self.cu.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()))
        return function

    def launch(
        self, function: ctypes.c_void_p, grid: Sequence[int], block: Sequence[int], *args: object,
        shared: int = 0, stream: ctypes.c_void_p | None = None,
    ) -> None:  # fmt: skip
        """Queue a kernel. Arguments are ctypes values, floats or 32-bit integers."""
        kinds = {int: ctypes.c_int, float: ctypes.c_float}
        held = [kinds[type(a)](a) if type(a) in kinds else a for a in args]
        values = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        shape = [*grid, 1, 1][:3] + [*block, 1, 1][:3]
        self.check(self.cu.cuLaunchKernel(function, *shape, shared, stream, values, None))

    def allocate(self, count: int, kind: type = ctypes.c_float) -> ctypes.c_void_p:
        """Give memory for so many numbers."""
        address = ctypes.c_void_p()
        size = ctypes.c_size_t(count * ctypes.sizeof(kind))
        self.check(self.cu.cuMemAlloc_v2(ctypes.byref(address), size))
        return address

    def put(self, numbers: Sequence[float], kind: type = ctypes.c_float) -> ctypes.c_void_p:
        """Give memory with these numbers."""
        address = self.allocate(len(numbers), kind)
        held = (kind * len(numbers))(*numbers)
        size = ctypes.c_size_t(ctypes.sizeof(held))
        self.check(self.cu.cuMemcpyHtoD_v2(address, held, size))
        return address

    def get(self, address: ctypes.c_void_p, count: int, kind: type = ctypes.c_float) -> list:
        """Give the numbers at an address, after all work of the default stream."""
        held = (kind * count)()
        self.check(self.cu.cuMemcpyDtoH_v2(held, address, ctypes.c_size_t(ctypes.sizeof(held))))
        return list(held)
