"""Kernels of the fake driver among PyTorch's on the test device."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated import cuda_device
from emulated.cuda_driver import CudaError, Driver

if not cuda_device.is_active():
    pytest.skip("about the test device, which -m cuda makes without a GPU", allow_module_level=True)

pytestmark = pytest.mark.cuda

ADD = """
extern "C" __global__ void add(float* x, float value, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += value;
}
"""


@pytest.fixture
def cuda() -> Driver:
    return Driver(cuda_device.use_driver())


def add(cuda, x, value, stream=None):
    address = ctypes.c_void_p(x.data_ptr())
    handle = ctypes.c_void_p(stream.native_handle) if stream else None
    cuda.launch(cuda.compile(ADD, "add"), [1], [64], address, value, x.numel(), stream=handle)


def test_kernels_take_turns_on_a_stream(cuda):
    x = torch.ones(8, device="cuda")
    add(cuda, x, 1.0)
    x.mul_(10)
    add(cuda, x, 2.0)
    assert x.tolist() == [22.0] * 8


def test_another_stream_has_to_be_waited_for(cuda):
    x, stream = torch.ones(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    add(cuda, x, 1.0, stream)
    assert x.tolist() == [1.0] * 8
    event = stream.record_event()
    add(cuda, x, 1.0, stream)
    torch.cuda.current_stream().wait_event(event)
    assert x.tolist() == [2.0] * 8
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 8


def test_memory_that_is_freed_too_early_on_another_stream(cuda):
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    text = """
extern "C" __global__ void copy(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x]; }
"""
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (y, x)]
    handle = ctypes.c_void_p(stream.native_handle)
    cuda.launch(cuda.compile(text, "copy"), [1], [8], *addresses, stream=handle)
    del x
    torch.cuda.current_stream().synchronize()
    stream.synchronize()
    assert y.isnan().all()


def test_memory_may_be_freed_behind_a_launch_on_its_stream(cuda):
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    text = """
extern "C" __global__ void copy(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x]; }
"""
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (y, x)]
    cuda.launch(cuda.compile(text, "copy"), [1], [8], *addresses)
    del x
    assert y.tolist() == [1.0] * 8


def test_memory_of_the_host_is_no_argument(cuda):
    with pytest.raises(CudaError, match="argument 0 is no memory of the device"):
        add(cuda, torch.ones(8), 1.0)


def test_a_kernel_that_fails_ends_pytorchs_calls(cuda):
    x = torch.ones(8, device="cuda")
    text = """
extern "C" __global__ void hangs(float* x) { if (threadIdx.x == 0) __syncthreads(); }
"""
    cuda.launch(cuda.compile(text, "hangs"), [1], [8], ctypes.c_void_p(x.data_ptr()))
    try:
        with pytest.raises(RuntimeError, match=r"CUDA error: hangs: .*reached by 1 of 8"):
            x.add_(1)
    finally:
        cuda.cu.emulated_forget_error()


@pytest.mark.parametrize("elements", [8, 9])
@pytest.mark.parametrize("then", ["del x; torch.cuda.synchronize()", "cuda_device.check_guards()"])
def test_who_writes_behind_the_end_of_memory(then, elements):
    program = f"""
from emulated import cuda_device, cuda_driver
cuda_device.activate()
import ctypes, torch
cuda = cuda_driver.Driver(cuda_device.use_driver())
x = torch.ones(8, device="cuda")
kernel = cuda.compile({ADD!r}, "add")
cuda.launch(kernel, [1], [64], ctypes.c_void_p(x.data_ptr()), 1.0, {elements})
torch.cuda.synchronize()
{then}
"""
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True)
    words = "emulated device: a kernel wrote behind the end of 32 bytes\n"
    want = (0, "") if elements == 8 else (-signal.SIGABRT, words)
    assert (done.returncode, done.stderr) == want
