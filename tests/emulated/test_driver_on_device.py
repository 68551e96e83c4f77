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


class TestGraphs:
    """`torch.cuda.CUDAGraph`, as the engine's tests rely on it."""

    @staticmethod
    def capture(work, stream=None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream or torch.cuda.Stream()):
            graph.capture_begin()
            try:
                made = work()
            finally:
                graph.capture_end()
        return graph, made

    def test_a_capture_does_nothing_and_replays_read_what_is_there(self):
        x, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

        def work():
            total.add_(x)
            return total * 2

        graph, made = self.capture(work)
        assert total.tolist() == [0] * 4
        assert made.isnan().all()
        for step in range(1, 4):
            x.fill_(step)
            graph.replay()
            assert made.tolist() == [2 * sum(range(step + 1))] * 4
        assert total.tolist() == [6] * 4

    def test_kernels_of_the_driver_are_in_it(self, cuda):
        y, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()
        function, address = cuda.compile(ADD, "add"), ctypes.c_void_p(y.data_ptr())
        handle = ctypes.c_void_p(stream.native_handle)

        def work():
            cuda.launch(function, [1], [64], address, 2.0, y.numel(), stream=handle)
            return y + 1

        graph, made = self.capture(work, stream)
        for step in range(1, 4):
            graph.replay()
            assert made.tolist() == [2 * step + 1] * 8

    def test_results_are_given_their_size_by_the_kernel(self):
        graph, made = self.capture(lambda: torch.arange(5, device="cuda") * 1)
        graph.replay()
        assert made.tolist() == [0, 1, 2, 3, 4]

    def test_a_graph_holds_addresses_and_no_memory(self):
        held = [torch.ones(1000, device="cuda")]
        graph, made = self.capture(lambda: held[0] * 2)
        held.clear()
        graph.replay()
        assert made.isnan().all()

    def test_memory_within_is_not_given_to_others(self):
        def work():
            x = torch.ones(1000, device="cuda")
            for _ in range(3):
                x = x * 2  # what x was is free from here on, for the graph alone
            return x

        graph, made = self.capture(work)
        others = [torch.zeros(1000, device="cuda") for _ in range(8)]
        graph.replay()
        assert made.eq(8).all()
        assert all(other.eq(0).all() for other in others)
        graph.replay()
        assert made.eq(8).all()
        kept = made.clone()
        del graph
        assert made.eq(kept).all()  # it is alive, whether the graph is or not
        cuda_device.check_guards()

    def test_random_numbers_go_on(self):
        torch.manual_seed(0)
        want = [torch.rand(4, device="cuda") for _ in range(4)]
        torch.manual_seed(0)
        graph, made = self.capture(lambda: torch.rand(4, device="cuda"))
        got = []
        for _ in range(2):
            graph.replay()
            got += [made.clone(), torch.rand(4, device="cuda")]
        assert all(map(torch.equal, got, want))

    @pytest.mark.parametrize(
        "ask",
        [torch.Tensor.item, torch.nonzero, torch.Tensor.cpu, lambda x: torch.cuda.synchronize()],
    )
    def test_asking_the_host_spoils_a_capture(self, ask):
        x = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[0]
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            with pytest.raises(RuntimeError, match="operation not permitted"):
                ask(x[:1])
            with pytest.raises(RuntimeError, match="operation failed due to a previous error"):
                graph.capture_end()
        with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
            torch.rand(4, device="cuda")
        generator.graphsafe_set_state(generator.clone_state())
        torch._C._cuda_endAllocateToPool(0, graph.pool())
        assert torch.rand(4, device="cuda").lt(1).all()

    def test_what_is_refused(self):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="non-default stream"):
            graph.capture_begin()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
