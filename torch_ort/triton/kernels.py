"""Starts kernels of Triton on memory of the engine: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import linecache
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_ort.triton.printer import Text


def why_not(device: str) -> str:
    """Say why no kernel of Triton can run on a kind of device; empty if one can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device == "cpu" and not is_interpreted():
        return "on the CPU, Triton needs its interpreter (TRITON_INTERPRET=1)"
    return ""


def is_interpreted() -> bool:
    """Whether Triton was told to interpret kernels, which it asks when a kernel is defined."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


class Address:
    """Memory of a GPU as Triton takes it in place of a tensor."""

    def __init__(self, at: int, dtype: torch.dtype) -> None:
        self._at = at
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Give the address, as a tensor does."""
        return self._at


def tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Give a tensor [count] over memory of the host, which has to live as long."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


_modules: dict[str, types.ModuleType] = {}
_lock = threading.Lock()


def module_of(source: str) -> types.ModuleType:
    """Define the kernels of a text. Equal texts share a module for the life of the process."""
    with _lock:
        if source not in _modules:
            name = f"torch_ort_triton_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
            file = f"<{name}>"
            # Triton reads the source of a function by the name of its file.
            lines = source.splitlines(keepends=True)
            linecache.cache[file] = (len(source), None, lines, file)
            module = types.ModuleType(name)
            exec(compile(source, file, "exec"), module.__dict__)
            _modules[source] = module
        return _modules[source]


def _dtype(name: str) -> torch.dtype:
    """Give the dtype of elements as a kernel reads them (words.py)."""
    return {"bool": torch.uint8, "bfloat16": torch.int16}.get(name) or getattr(torch, name)


def _extent(access: Mapping[str, Any]) -> int:
    """Give the number of elements from the first one to the end of the last one."""
    axes = [*access["rows"], *access["columns"]]
    if any(size == 0 for size, _ in axes):
        return 0
    return access["begin"] + 1 + sum((size - 1) * stride for size, stride in axes)


class Kernel:
    """A region for one set of sizes, as csrc/python/region_writer.h wants it.

    Raises what Triton raises where it cannot compile the text for a GPU.
    """

    def __init__(self, body: Mapping[str, Any], text: Text) -> None:
        self.text = text.source
        self._text = text
        self._module = module_of(text.source)
        self._is_on_host = body["device"] == "cpu"
        self._wide = torch.float64 if text.is_double else torch.float32
        self._inputs = [(_dtype(each["dtype"]), _extent(each)) for each in body["inputs"]]
        results: dict[int, tuple[torch.dtype, int]] = {}
        for each in [*body["stores"], *body["sums"]]:
            to = each["to"]
            dtype, extent = results.get(to["result"], (_dtype(to["dtype"]), 0))
            results[to["result"]] = (dtype, max(extent, _extent(to)))
        self._outputs = [results[i] for i in range(len(body["output_names"]))]
        if not self._is_on_host:
            self._compile()

    def _compile(self) -> None:
        """Compile for the current GPU, so that what Triton cannot do shows before a kernel runs."""
        inputs = [Address(0, dtype) for dtype, _ in self._inputs]
        outputs = [Address(0, dtype) for dtype, _ in self._outputs]
        lines = [Address(0, self._wide) for _ in self._text.sums]
        word = Address(0, torch.int32)
        self._module.region.warmup(*inputs, *outputs, *lines, word, grid=(1,))
        for i, each in enumerate(self._text.sums):
            kernel = getattr(self._module, f"sums{i}")
            kernel.warmup(lines[i], outputs[each.output], grid=(1,))

    def run(self, inputs: Sequence[int], outputs: Sequence[int], faults: int, device: int) -> None:
        """Start the kernels on addresses of first elements. The CPU has finished them then."""
        if self._is_on_host:
            self._start(inputs, outputs, faults, torch.device("cpu"))
        else:
            with torch.cuda.device(device):
                self._start(inputs, outputs, faults, torch.device("cuda", device))

    def _start(
        self, inputs: Sequence[int], outputs: Sequence[int], faults: int, on: torch.device
    ) -> None:
        given = [self._at(*each) for each in zip(inputs, self._inputs, strict=True)]
        made = [self._at(*each) for each in zip(outputs, self._outputs, strict=True)]
        lines = [
            torch.empty(self._text.programs * each.columns, dtype=self._wide, device=on)
            for each in self._text.sums
        ]
        word = self._at(faults, (torch.int32, 1))
        if self._text.programs > 0:
            self._module.region[(self._text.programs,)](*given, *made, *lines, word)
        for i, each in enumerate(self._text.sums):
            if self._text.sum_programs[i] > 0:
                kernel = getattr(self._module, f"sums{i}")
                kernel[(self._text.sum_programs[i],)](lines[i], made[each.output])

    def _at(self, address: int, of: tuple[torch.dtype, int]) -> Any:
        dtype, count = of
        return tensor_at(address, count, dtype) if self._is_on_host else Address(address, dtype)
