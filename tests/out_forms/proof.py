"""Calls an `out=` overload as the engine does, and compares with what its functional form gives.

The engine's memory has the exact number of bytes, in a storage that cannot be resized, and holds
whatever was there before; here it also stands between bytes that nobody may write.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.out_forms.overloads import Pair

GUARD_BYTES, ALIGNMENT = 4096, 64
GUARD, GARBAGE = 0xA5, 0xFF  # all bits set: NaN, or -1

Strides = Callable[
    [Tensor], tuple[int, ...]
]  # of a result, chosen by what the functional form gave


class Wrong(Exception):
    """An out overload did something else than its functional form; the message says what."""


class NoCall(Exception):
    """The functional form does not take the arguments either."""


@dataclass(frozen=True)
class Call:
    """One call of the functional form of a pair."""

    pair: Pair
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """List the tensors among the arguments, those of lists included."""
        found: list[Tensor] = []
        self.replace(lambda _, tensor: found.append(tensor))
        return found

    def replace(self, change: Callable[[int, Tensor], Any]) -> Call:
        """Give the call with other tensors; `change` gets each with its number in `tensors`."""
        count = 0

        def of(value: Any) -> Any:
            nonlocal count
            if isinstance(value, Tensor):
                count += 1
                return change(count - 1, value)
            return [of(item) for item in value] if isinstance(value, (list, tuple)) else value

        args = tuple(of(value) for value in self.args)
        return Call(self.pair, args, {name: of(value) for name, value in self.kwargs.items()})

    def copy(self) -> Call:
        """Give a call whose tensors are copies with the same layouts."""
        return self.replace(lambda _, tensor: copy_of(tensor))


def copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, also where elements share memory, and its conjugate bit."""
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    plain = tensor.conj() if is_conj else tensor
    plain = torch._neg_view(plain) if is_neg else plain
    size = span(plain)
    memory = torch.empty(size, dtype=plain.dtype, device=plain.device)
    memory.copy_(plain.detach().as_strided((size,), (1,)))
    copy = memory.as_strided(plain.shape, plain.stride(), 0)
    copy = torch._neg_view(copy) if is_neg else copy
    return copy.conj() if is_conj else copy


def span(tensor: Tensor) -> int:
    """Count the elements of memory from the first element of a tensor to its last."""
    return span_of(tensor.shape, tensor.stride())


def span_of(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count as `span` does."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _bytes_on_cuda(address: int, size: int) -> Tensor:
    """Give memory as a tensor whose storage has that size, as other libraries hand it over."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cuda")

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Memory(), device="cuda")


class PlannedMemory:
    """Memory for a result, and the tensor that is given to the kernel."""

    def __init__(self, result: Tensor, strides: tuple[int, ...]) -> None:
        self.sizes, self.strides = tuple(result.shape), tuple(strides)
        self.bytes = span_of(self.sizes, self.strides) * result.element_size()
        self.is_full = self.bytes == result.numel() * result.element_size()
        end = GUARD_BYTES + self.bytes
        if result.is_cuda:
            self._all = torch.full((end + GUARD_BYTES,), GUARD, dtype=torch.uint8, device="cuda")
            inside = _bytes_on_cuda(self._all.data_ptr() + GUARD_BYTES, self.bytes)
        else:
            raw = np.full(end + GUARD_BYTES + ALIGNMENT, GUARD, np.uint8)
            begin = -raw.ctypes.data % ALIGNMENT
            self._all = torch.from_numpy(raw[begin : begin + end + GUARD_BYTES])
            inside = torch.from_numpy(raw[begin + GUARD_BYTES : begin + end])
        inside.fill_(GARBAGE)
        self.tensor = inside.view(result.dtype).as_strided(self.sizes, self.strides)
        self.address = self.tensor.untyped_storage().data_ptr()

    def check(self, name: str) -> None:
        """Raise Wrong unless the tensor is as it was made and nothing was written around it."""
        got = tuple(self.tensor.shape), self.tensor.stride()
        if got[0] != self.sizes:
            raise Wrong(f"resizes {name}")
        if got[1] != self.strides:
            raise Wrong(f"changes the strides of {name}")
        storage = self.tensor.untyped_storage()
        if storage.data_ptr() != self.address or storage.nbytes() != self.bytes:
            raise Wrong(f"replaces the memory of {name}")
        guards = self._all[:GUARD_BYTES], self._all[GUARD_BYTES + self.bytes :]
        if not all(bool((guard == GUARD).all()) for guard in guards):
            raise Wrong(f"writes outside of {name}")
        if not self.is_full and self._gaps_were_written():
            raise Wrong(f"writes into the gaps of {name}")

    def _gaps_were_written(self) -> bool:
        inside = self._all[GUARD_BYTES : GUARD_BYTES + self.bytes]
        gaps = torch.full_like(inside, GARBAGE)
        gaps.view(self.tensor.dtype).as_strided(self.sizes, self.strides).zero_()
        return bool(((inside != GARBAGE) & (gaps != 0)).any())


@dataclass(frozen=True)
class Truth:
    """What the functional form gives, and its arguments afterwards."""

    results: list[Tensor]
    arguments: list[Tensor]


def truth_of(call: Call) -> Truth:
    """Run the functional form. Raises NoCall if it raises."""
    used = call.copy()
    try:
        results = _run(call.pair.functional, used, {})
    except Exception as error:
        raise NoCall(str(error)) from error
    return Truth(results, used.tensors())


def _run(op: Any, call: Call, outs: dict[str, Tensor]) -> list[Tensor]:
    if call.pair.is_random:
        torch.manual_seed(0)
    result = op(*call.args, **call.kwargs, **outs)
    return [result] if isinstance(result, Tensor) else list(result)


class Warnings:
    """Collects what PyTorch warns of: called from no function of its own, it prints that."""

    def __enter__(self) -> Warnings:
        self._always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        self._stderr = os.dup(2)
        self._file = tempfile.TemporaryFile()
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._file.close()
        torch.set_warn_always(self._always)

    def take(self) -> str:
        """Give what was printed since the last time."""
        if os.fstat(self._file.fileno()).st_size == 0:
            return ""
        self._file.seek(0)
        text = self._file.read().decode(errors="replace")
        self._file.seek(0)
        self._file.truncate()
        return text


def prove(
    call: Call, truth: Truth, strides: Strides, said: Warnings, over: int | None = None
) -> None:
    """Run the out form into planned memory. Raises Wrong.

    `over`: the number of an argument whose memory the result gets.
    """
    planned = [PlannedMemory(result, strides(result)) for result in truth.results]
    used = call.copy()
    if over is not None:
        memory = planned[0].tensor
        memory.copy_(used.tensors()[over])
        used = used.replace(lambda i, tensor: memory if i == over else tensor)
    names = call.pair.names
    said.take()
    try:
        given = _run(
            call.pair.out, used, {n: p.tensor for n, p in zip(names, planned, strict=True)}
        )
    except Exception as error:
        raise Wrong(f"raises {str(error).strip().splitlines()[0]}") from error
    if "was resized" in said.take():
        raise Wrong("warns that a result was resized")
    for name, memory, tensor, wanted in zip(names, planned, given, truth.results, strict=True):
        memory.check(name)
        if not is_same(memory.tensor, wanted):
            raise Wrong(f"gives other numbers in {name}")
        if tensor.data_ptr() != memory.tensor.data_ptr() or tensor.shape != wanted.shape:
            raise Wrong(f"returns another tensor than {name}")
    for number, (tensor, wanted) in enumerate(zip(used.tensors(), truth.arguments, strict=True)):
        if number != over and not is_same(tensor, wanted):
            raise Wrong(f"writes into argument {number}")


def is_same(got: Tensor, want: Tensor) -> bool:
    """Compare numbers; other strides may mean another loop, and so other last digits."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if got.dtype == torch.complex32:  # which nothing compares
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if torch.equal(got, want):
        return True
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError:
        return False
    return True
