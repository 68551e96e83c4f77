# Makes `cuda` a device of a PyTorch without CUDA (device/*.cpp), and fills in what torch.cuda asks
# of the bindings that such a PyTorch lacks, so that the Python of torch.cuda itself runs.
from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from emulated import build, cuda_driver, cuda_names

COUNT_GPUS = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit(1)
count = ctypes.c_int()
failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
raise SystemExit(1 if failed or count.value == 0 else 0)
"""

_library: ctypes.CDLL | None = None


def is_possible() -> bool:
    """Tell whether this machine has no GPU for the PyTorch that is installed.

    One that is built with CUDA lends the test device its name (cuda_names.py).
    """
    version = build.torch_version()
    if any(version.get(name) is not None for name in ("hip", "xpu")):
        return False
    return version.get("cuda") is None or not has_gpu()


def has_gpu() -> bool:
    """Ask the driver of CUDA, in a process of its own, since one that has asked cannot fork."""
    return subprocess.run([sys.executable, "-c", COUNT_GPUS], check=False).returncode == 0


def is_active() -> bool:
    """Tell whether `cuda` is the test device in this process."""
    return _library is not None


def activate() -> None:
    """Make `cuda` the test device, for as long as the process lives.

    Raises RuntimeError if torch is imported already: it looks for accelerators once, then.
    """
    global _library
    if is_active():
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the test device was made")
    cuda_names.load()
    # Its symbols stay its own, and so do those of libtorch, which it brings.
    _library = ctypes.CDLL(str(build.device_library()), ctypes.RTLD_LOCAL)
    _library.emulated_calls.restype = ctypes.c_char_p
    _library.emulated_graph_new.restype = ctypes.c_void_p
    for name in "begin", "end", "replay":
        getattr(_library, f"emulated_graph_{name}").restype = ctypes.c_char_p
    _library.emulated_set_memory_fraction.argtypes = [ctypes.c_double]
    _fill_in_bindings()


def use_driver() -> Path:
    """Have the device work with the fake driver from now on, and give the path of its library.

    Streams are the driver's then, and kernels that were launched run before PyTorch's of the same
    stream, or when somebody waits for them. torch_ort finds it too, with its NVRTC.
    """
    assert _library is not None
    path = cuda_driver.library()
    os.environ["TORCH_ORT_LIBCUDA"] = os.environ["TORCH_ORT_NVRTC"] = str(path)
    # What is built here is of no use with another driver, nor with that of another checkout.
    os.environ["TORCH_ORT_KERNEL_CACHE_BYTES"] = "0"
    _library.emulated_use_driver(str(path).encode())
    return path


def check_guards() -> None:
    """End the process if a kernel has written behind the end of its memory.

    The device looks by itself where memory is freed.
    """
    assert _library is not None
    _library.emulated_check_guards()


def calls() -> Counter[str]:
    """Count the kernels that have run on the device, by the operator's full name."""
    assert _library is not None
    lines = _library.emulated_calls().decode().splitlines()
    return Counter({name: int(count) for name, count in (line.split() for line in lines)})


@dataclass(frozen=True)
class Properties:
    """What the device says of itself: a small one of compute capability 9.0."""

    name: str = "test device on the CPU"
    major: int = 9
    minor: int = 0
    total_memory: int = 16 << 30
    multi_processor_count: int = 4
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    L2_cache_size: int = 8 << 20


def _fill_in_bindings() -> None:
    import torch

    assert _library is not None
    fraction = 1.0

    def check_device(device: int) -> None:
        if device not in (-1, 0):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")

    def exchange_device(device: int) -> int:
        check_device(device)
        return 0 if device == 0 else -1

    # A function of its own: Dynamo knows both, and tells functions apart by identity.
    def maybe_exchange_device(device: int) -> int:
        return exchange_device(device)

    def set_memory_fraction(new: float, device: int) -> None:
        nonlocal fraction
        check_device(device)
        fraction = new
        _library.emulated_set_memory_fraction(new)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch.accelerator.set_stream(
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    def stream_data(stream: torch.Stream) -> tuple[int, int, int]:
        return stream.stream_id, stream.device_index, stream.device_type

    bindings: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": check_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": maybe_exchange_device,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_synchronize": lambda: torch.accelerator.synchronize(0),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCurrentStream": lambda device: stream_data(
            torch.accelerator.current_stream(device)
        ),
        "_cuda_getDefaultStream": lambda device: (0, 0, 1),
        "_cuda_getCurrentRawStream": lambda device: (
            torch.accelerator.current_stream(device).stream_id
        ),
        "_cuda_setStream": set_stream,
        "_cuda_memoryStats": torch._C._accelerator_getDeviceStats,
        "_cuda_resetPeakMemoryStats": torch._C._accelerator_resetPeakStats,
        "_cuda_resetAccumulatedMemoryStats": torch._C._accelerator_resetAccumulatedStats,
        "_cuda_emptyCache": torch._C._accelerator_emptyCache,
        "_cuda_setMemoryFraction": set_memory_fraction,
        "_cuda_getMemoryFraction": lambda device: fraction,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_isCurrentStreamCapturing": _is_capturing,
        "_cuda_endAllocateToPool": _Graph.end_pool,
    }
    for name, value in bindings.items():
        setattr(torch._C, name, value)

    cuda = torch.cuda
    cuda._exchange_device = exchange_device
    cuda._maybe_exchange_device = maybe_exchange_device
    cuda._get_device_properties = lambda device: Properties()
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = _is_capturing
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = _Graph
    cuda.default_generators = (torch.Generator(device="cuda"),)
    cuda.Stream = cuda.streams.Stream = _Stream
    cuda.Event = cuda.streams.Event = _Event
    cuda.mem_get_info = cuda.memory.mem_get_info = _memory_info
    cuda._initialized = True

    # A storage of CUDA is made by what this torch was built without; one of a tensor is the same.
    make = torch.UntypedStorage.__new__

    def make_storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = make_storage


def _is_capturing() -> bool:
    assert _library is not None
    return bool(_library.emulated_is_capturing())


class _Graph:
    """`torch.cuda.CUDAGraph`, with a memory pool of its own."""

    _by_pool: ClassVar[dict[tuple[int, int], weakref.ref[_Graph]]] = {}

    def __init__(self, keep_graph: bool = False) -> None:
        assert _library is not None
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(_library.emulated_graph_new())
        self._id = 0, len(self._by_pool) + 1
        self._by_pool[self._id] = weakref.ref(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if pool is not None:
            raise RuntimeError("emulated device: each graph has a pool of its own")
        modes = "global", "thread_local", "relaxed"
        self._call("begin", ctypes.c_int(modes.index(capture_error_mode)))

    def capture_end(self) -> None:
        self._call("end")

    def replay(self) -> None:
        self._call("replay")

    def pool(self) -> tuple[int, int]:
        return self._id

    def reset(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            _library.emulated_graph_free(handle)

    def __del__(self) -> None:
        self.reset()

    @classmethod
    def end_pool(cls, device: int, pool: tuple[int, int]) -> None:
        graph = cls._by_pool[pool]()
        assert graph is not None
        _library.emulated_graph_end_pool(graph._handle)

    def _call(self, name: str, *args: Any) -> None:
        import torch

        words = getattr(_library, f"emulated_graph_{name}")(self._handle, *args)
        if words is not None:
            text = words.decode()
            error = torch.AcceleratorError if text.startswith("CUDA error") else RuntimeError
            raise error(text)


def _memory_info(device: Any = None) -> tuple[int, int]:
    import torch

    return torch.accelerator.get_memory_info(0)


class _Streams(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        import torch

        return isinstance(instance, torch.Stream)


class _Stream(metaclass=_Streams):
    """`torch.cuda.Stream`: `torch.Stream` with its arguments."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: int) -> Any:
        import torch

        if kwargs:
            return torch.Stream(**kwargs)
        return torch.Stream(device="cuda" if device is None else device, priority=priority)


class _Events(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        import torch

        return isinstance(instance, torch.Event)


# No subclass: the time between two events is only told of `torch.Event` itself.
class _Event(metaclass=_Events):
    """`torch.cuda.Event`: `torch.Event` with its arguments."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Any:
        import torch

        return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)
