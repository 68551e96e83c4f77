"""CUDA graphs, as PyTorch captures them for the engine (csrc/run/replay.h)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from torch_ort.pytorch.private import _cuda_endAllocateToPool


def capture(device: int, queue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture what `queue` queues on the current stream of a device. None of it runs.

    Only calls of this thread may spoil the capture: loaders of data and the watchdogs of
    communication go on. Raises what PyTorch raises if it is spoilt.
    """
    graph = torch.cuda.CUDAGraph()
    outer = torch.cuda.current_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(_stream(device, outer.stream_id)):
        graph.capture_begin(capture_error_mode="thread_local")
        queue()
        try:
            graph.capture_end()
        except BaseException:
            _leave_capture(device, graph)
            raise
    return graph


@functools.cache
def _stream(device: int, outer: int) -> torch.cuda.Stream:
    # The default stream cannot be captured. Libraries have a workspace for each stream, which all
    # graphs that are captured on it share. So there is one for each stream that graphs run on.
    return torch.cuda.Stream(device)


def _leave_capture(device: int, graph: torch.cuda.CUDAGraph) -> None:
    """Have PyTorch leave a capture that has failed.

    It would go on to take memory from the graph's pool, and every dropout would raise an error.
    """
    _cuda_endAllocateToPool(device, graph.pool())
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
