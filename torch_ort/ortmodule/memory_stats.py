"""Memory by phase of a step, as ORTMODULE_PRINT_MEMORY_STATS prints it."""

from __future__ import annotations

import resource
from typing import Any

import torch

from torch_ort.capture.logs import rank_and_world
from torch_ort.core import counting
from torch_ort.pytorch.autograd_compat import after_backward
from torch_ort.pytorch.module_compat import pytree

_MIB = 2**20


class MemoryStats:
    """Prints a line at each phase of steps 0 to 9, and then of those that are powers of two.

    On CUDA the caching allocator's figures, on the CPU the resident memory and the engine's.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._step = 0

    def before_forward(self) -> None:
        """Print the phase `pre_forward`."""
        if self._step == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._print("pre_forward")

    def after_forward(self, result: Any) -> None:
        """Print the phase `post_forward`, and those of backward once it comes."""
        self._print("post_forward")
        waiting = [
            leaf
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not waiting or not self._module.training:
            self._step += 1
            return
        seen: list[bool] = []

        def on_backward(gradient: torch.Tensor) -> None:
            if not seen:
                seen.append(True)
                self._print("pre_backward")
                after_backward(self._after_backward)

        for tensor in waiting:
            tensor.register_hook(on_backward)

    def _after_backward(self) -> None:
        self._print("post_backward")
        self._step += 1

    def _print(self, phase: str) -> None:
        rank, _ = rank_and_world()
        step = self._step
        if rank != 0 or not (step < 10 or step & (step - 1) == 0):
            return
        figures = [*self._device_figures(), *self._module_figures()]
        text = " | ".join(f"{name}: {round(size / _MIB)}" for name, size in figures)
        print(f"rank-{rank} step {step} memory (MiB) | phase: {phase} | {text}")

    def _device_figures(self) -> list[tuple[str, float]]:
        first = next(self._module.parameters(), None)
        if first is not None and first.is_cuda:
            stats = torch.cuda.memory_stats()
            return [
                ("allocated", torch.cuda.memory_allocated()),
                ("max allocated", torch.cuda.max_memory_allocated()),
                ("cached", torch.cuda.memory_reserved()),
                ("max cached", torch.cuda.max_memory_reserved()),
                ("inactive", stats.get("inactive_split_bytes.all.current", 0)),
                ("max inactive", stats.get("inactive_split_bytes.all.peak", 0)),
            ]
        counters = counting.counters()
        resident = _resident_bytes()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return [
            ("resident", resident),
            # Linux updates the two figures at different times.
            ("max resident", max(resident, most)),
            ("arena", counters["arena_bytes"]),
            ("max arena", counters["arena_bytes_peak"]),
        ]

    def _module_figures(self) -> list[tuple[str, int]]:
        parameters = list(self._module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = (
            ("param", parameters), ("grad", gradients), ("buffer", list(self._module.buffers())),
        )  # fmt: skip
        return [(name, sum(tensor.nbytes for tensor in held)) for name, held in tensors]


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
