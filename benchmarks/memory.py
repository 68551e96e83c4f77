"""Peak memory of this process: the resident set on the CPU, PyTorch's allocator on CUDA.

On CUDA there are two figures. What is allocated is the tensors alone. What is reserved is the
memory that other processes cannot have: tensors, gaps between them, and the pools of CUDA graphs,
in which a replay allocates nothing.
"""

import ctypes
import gc
from pathlib import Path

import torch

# Pinned to glibc's own starting values. Left alone, glibc raises them after the first large
# `free`, and from then on the peak depends on what the heap went through before.
PINNED_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}

# The same for a process that runs already: numbers of mallopt's parameters (glibc, malloc.h).
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def pin_malloc() -> None:
    """Pin the thresholds of this process from here on, as PINNED_MALLOC does from its start."""
    libc = ctypes.CDLL(None)
    # Other C libraries than glibc have neither.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, int(PINNED_MALLOC["MALLOC_MMAP_THRESHOLD_"]))
        libc.mallopt(_TRIM_THRESHOLD, int(PINNED_MALLOC["MALLOC_TRIM_THRESHOLD_"]))


class HighWater:
    """Measures the most memory held above a starting point."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.start_bytes = 0

    def start(self) -> None:
        """Give unused memory back, then take what is left as the starting point.

        Raises OSError if Linux does not let this process reset its high-water mark.
        """
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.start_bytes = torch.cuda.memory_allocated()
            return
        trim_heap()
        # 5 sets VmHWM back to the present resident set (Linux, proc_pid_clear_refs).
        Path("/proc/self/clear_refs").write_text("5")
        self.start_bytes = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Return the peak since `start`, in bytes above the starting point."""
        if self.cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self.start_bytes
        return status_bytes("VmHWM") - self.start_bytes

    def reserved_bytes(self) -> int | None:
        """Return all that PyTorch's allocator had of the GPU at most since `start`."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["reserved_bytes.all.peak"]


def trim_heap() -> None:
    libc = ctypes.CDLL(None)
    # Other C libraries than glibc have no malloc_trim; their freed pages stay in the start value.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: no field {field!r}")


def tensor_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
