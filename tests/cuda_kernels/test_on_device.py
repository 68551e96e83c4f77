"""Kernels among PyTorch's, on its streams, memory and threads: on a GPU or the test device."""

from __future__ import annotations

import struct

import pytest
import torch
from emulated import cuda_device
from in_process import AXPY

from torch_ort import _C
from torch_ort.engine.cuda import configure

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module", autouse=True)
def driver() -> None:
    if cuda_device.is_active():
        cuda_device.use_driver()
    configure()


@pytest.fixture
def module() -> _C.cuda.Module:
    return _C.cuda.build("axpy", AXPY)


def axpy(module: _C.cuda.Module, y: int, x: torch.Tensor, a: float) -> None:
    values = struct.pack("P", y), struct.pack("P", x.data_ptr()), struct.pack("f", a)
    arguments = [*values, struct.pack("i", x.numel())]
    stream = _C.cuda.current_stream()
    module.launch("axpy", (x.numel() // 64 + 1, 1, 1), (64, 1, 1), arguments, stream=stream)


def test_a_kernel_takes_its_turn_on_the_stream_in_force(module):
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x, y = torch.arange(1000.0, device="cuda"), torch.ones(1000, device="cuda")
            axpy(module, y.data_ptr(), x, 0.5)
            y.mul_(2)
            axpy(module, y.data_ptr(), x, 1.0)
        stream.synchronize()
        assert torch.equal(y.cpu(), 2 + 2 * torch.arange(1000.0))


def test_streams_are_those_of_pytorch():
    assert _C.cuda.current_stream() == torch.cuda.current_stream().native_handle
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert _C.cuda.current_stream() == stream.native_handle


def test_scratch_comes_from_pytorchs_allocator(module):
    before = torch.cuda.memory_allocated()
    scratch = _C.cuda.Scratch(4000)
    assert torch.cuda.memory_allocated() >= before + 4000
    assert scratch.data % 256 == 0
    x = torch.arange(1000.0, device="cuda")
    axpy(module, scratch.data, x, 0.0)
    del scratch  # its memory may be used by what is queued
    assert torch.cuda.memory_allocated() < before + 4000 + x.nbytes
    torch.cuda.synchronize()
    assert _C.cuda.Scratch(0).data == 0


def test_backward_threads_launch_too(module):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            result = gradient.clone()
            axpy(module, result.data_ptr(), gradient.contiguous(), 1.0)
            return result

    x = torch.ones(100, device="cuda", requires_grad=True)
    (Doubled.apply(x) * 3).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((100,), 6.0))


def test_the_device_is_pytorchs():
    ours, theirs = _C.cuda.device(0), torch.cuda.get_device_properties(0)
    assert ours.architecture == f"sm_{theirs.major}{theirs.minor}"
    assert ours.num_multiprocessors == theirs.multi_processor_count
    assert ours.max_shared_bytes == theirs.shared_memory_per_block_optin
