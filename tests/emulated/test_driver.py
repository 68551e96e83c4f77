"""The fake driver and NVRTC: kernels run as CUDA says, and what a GPU would refuse is refused."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import cuda_driver
from emulated.cuda_driver import ORDERS, CudaError, Driver

AXPY = """
extern "C" __global__ void axpy(float* y, const float* x, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
"""
# A sum over a block through shuffles and shared memory; one of its barriers may be left out.
SUM = """
#ifdef EMULATED_CUDA
#define SHARED(name) EMULATED_SHARED(name)
#else
#define SHARED(name) extern __shared__ char name[]
#endif
extern "C" __global__ void sums(float* out, const float* x, int rounds) {
  SHARED(memory);
  float* scratch = reinterpret_cast<float*>(memory);
  for (int round = 0; round < rounds; ++round) {
    float value = x[round * blockDim.x + threadIdx.x];
    for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, bits);
    BEFORE
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    AFTER
    float sum = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += scratch[warp];
    out[round * blockDim.x + threadIdx.x] = sum;
  }
}
"""


@pytest.fixture(scope="module")
def shared_driver() -> Driver:
    return Driver()


@pytest.fixture
def cuda(shared_driver, monkeypatch) -> Driver:
    monkeypatch.delenv("EMULATED_CUDA_ORDER", raising=False)
    yield shared_driver
    shared_driver.cu.cuCtxSynchronize()
    shared_driver.cu.emulated_forget_error()


def sums(cuda, before="__syncthreads();", after="__syncthreads();"):
    rounds, threads = 3, 128
    text = SUM.replace("BEFORE", before).replace("AFTER", after)
    x = [float(i % 7) for i in range(rounds * threads)]
    out = cuda.allocate(len(x))
    args = out, cuda.put(x), rounds
    cuda.launch(cuda.compile(text, "sums"), [1], [threads], *args, shared=16)
    rows = [x[i : i + threads] for i in range(0, len(x), threads)]
    return cuda.get(out, len(x)), [sum(row) for row in rows for _ in row]


@pytest.mark.parametrize("order", ORDERS)
def test_elementwise(cuda, monkeypatch, order):
    monkeypatch.setenv("EMULATED_CUDA_ORDER", order)
    y, x = cuda.put([1.0] * 1000), cuda.put([float(i) for i in range(1000)])
    cuda.launch(cuda.compile(AXPY, "axpy"), [8], [128], y, x, 0.5, 1000)
    assert cuda.get(y, 1000) == [1 + i / 2 for i in range(1000)]


@pytest.mark.parametrize("order", ORDERS)
def test_warps_barriers_and_shared_memory(cuda, monkeypatch, order):
    monkeypatch.setenv("EMULATED_CUDA_ORDER", order)
    got, want = sums(cuda)
    assert got == want


def test_fast_division_by_large_numbers_gives_zero(cuda):
    text = """
extern "C" __global__ void divide(float* y, const float* x, float by) {
  y[threadIdx.x] = __fdividef(x[threadIdx.x], by);
}
"""
    x, y = cuda.put([1.0, -3.0, math.inf]), cuda.allocate(3)
    for by, want in ((2.0**125, [2.0**-125, -3 * 2.0**-125, math.inf]), (2.0**127, [0.0, 0.0])):
        cuda.launch(cuda.compile(text, "divide"), [1], [3], y, x, by)
        assert cuda.get(y, 3)[: len(want)] == want
    assert math.isnan(cuda.get(y, 3)[2])


def is_right(result):
    got, want = result
    return got == want


@pytest.mark.parametrize("left_out", ["before", "after"])
def test_a_missing_barrier_shows_in_some_order(cuda, monkeypatch, left_out):
    right = {}
    for order in ORDERS:
        monkeypatch.setenv("EMULATED_CUDA_ORDER", order)
        right[order] = is_right(sums(cuda, **{left_out: ""}))
    assert not all(right.values())


def test_an_order_that_is_none(cuda, monkeypatch):
    monkeypatch.setenv("EMULATED_CUDA_ORDER", "sideways")
    with pytest.raises(CudaError, match="EMULATED_CUDA_ORDER: got 'sideways', want forward"):
        sums(cuda)


def test_work_is_late(cuda):
    y, x = cuda.put([1.0] * 4), cuda.put([1.0] * 4)
    stream, other = ctypes.c_void_p(), ctypes.c_void_p()
    for each in (stream, other):
        cuda.check(cuda.cu.cuStreamCreate(ctypes.byref(each), 1))
    kernel = cuda.compile(AXPY, "axpy")
    cuda.launch(kernel, [1], [4], y, x, 1.0, 4, stream=stream)
    cuda.check(cuda.cu.cuStreamSynchronize(other))
    assert cuda.get(y, 4) == [1.0] * 4  # nobody has waited for the stream
    event = ctypes.c_void_p()
    cuda.check(cuda.cu.cuEventCreate(ctypes.byref(event), 0))
    cuda.check(cuda.cu.cuEventRecord(event, stream))
    cuda.launch(kernel, [1], [4], y, x, 1.0, 4, stream=stream)
    cuda.check(cuda.cu.cuStreamWaitEvent(other, event, 0))
    cuda.check(cuda.cu.cuStreamSynchronize(other))
    assert cuda.get(y, 4) == [2.0] * 4  # what stands before the event, and no more
    cuda.check(cuda.cu.cuCtxSynchronize())
    assert cuda.get(y, 4) == [3.0] * 4


def test_memory_is_poisoned(cuda):
    assert all(map(math.isnan, cuda.get(cuda.allocate(8), 8)))


@pytest.mark.parametrize(
    ("grid", "block", "shared", "words"),
    [
        ([0], [32], 0, "a dimension is 0"),
        ([1, 70000], [32], 0, "the grid is too large"),
        ([1], [2048], 0, "the block is too large"),
        ([1], [1, 1, 128], 0, "the block is too large"),
        ([1], [32], 50 << 10, "more shared memory than the function may have"),
    ],
)
def test_a_launch_that_cannot_be(cuda, grid, block, shared, words):
    y = cuda.put([1.0])
    with pytest.raises(CudaError, match=f"CUDA_ERROR_INVALID_VALUE: axpy .*{words}"):
        cuda.launch(cuda.compile(AXPY, "axpy"), grid, block, y, y, 1.0, 1, shared=shared)


def test_launch_bounds(cuda):
    text = AXPY.replace("void axpy", "void __launch_bounds__(64) axpy")
    y = cuda.put([1.0])
    with pytest.raises(CudaError, match="more threads than its launch bounds"):
        cuda.launch(cuda.compile(text, "axpy"), [1], [128], y, y, 1.0, 1)


def test_shared_memory_on_request(cuda):
    kernel, y = cuda.compile(AXPY, "axpy"), cuda.put([1.0])
    cuda.check(cuda.cu.cuFuncSetAttribute(kernel, 8, 100 << 10))
    cuda.launch(kernel, [1], [32], y, y, 1.0, 1, shared=100 << 10)
    assert cuda.get(y, 1) == [2.0]
    with pytest.raises(CudaError, match="more shared memory than a block can have"):
        cuda.check(cuda.cu.cuFuncSetAttribute(kernel, 8, 228 << 10))


def test_memory_of_the_host_is_no_argument(cuda):
    held = (ctypes.c_float * 4)()
    address = ctypes.c_void_p(ctypes.addressof(held))
    with pytest.raises(CudaError, match=r"ILLEGAL_ADDRESS: axpy .*argument 0 is no memory"):
        cuda.launch(cuda.compile(AXPY, "axpy"), [1], [4], address, cuda.put([1.0]), 1.0, 1)


def test_freed_memory_is_no_argument(cuda):
    y = cuda.put([1.0])
    cuda.check(cuda.cu.cuMemFree_v2(y))
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        cuda.launch(cuda.compile(AXPY, "axpy"), [1], [4], y, y, 1.0, 1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if (threadIdx.x < 32) __syncthreads();", "a barrier is reached by 32 of 64 threads"),
        (
            "if (threadIdx.x < 32) {\n __syncthreads();\n } else {\n __syncthreads();\n }",
            "wait at different barriers",
        ),
        (
            "if (threadIdx.x % 32 < 16) x[0] = __shfl_sync(0xFFFFFFFF, x[0], 0);",
            "waits for lanes that never come",
        ),
        (
            "if (threadIdx.x % 32 >= 16) x[0] = __shfl_sync(0xFFFF, x[0], 0);",
            "not in the mask of its own operation",
        ),
        (
            "if (threadIdx.x % 32 < 16) x[0] = __shfl_down_sync(0xFFFF, x[0], 8);",
            "a shuffle reads a lane that is not in its mask",
        ),
    ],
)
def test_a_kernel_that_hangs_on_a_gpu_fails(cuda, body, words):
    text = f'extern "C" __global__ void hangs(float* x) {{ {body} }}'
    x = cuda.put([1.0])
    cuda.launch(cuda.compile(text, "hangs"), [1], [64], x)
    with pytest.raises(CudaError, match=f"CUDA_ERROR_LAUNCH_FAILED: hangs: line .*{words}"):
        cuda.check(cuda.cu.cuCtxSynchronize())
    # As on a GPU, the context is of no more use.
    with pytest.raises(CudaError, match="LAUNCH_FAILED"):
        cuda.put([1.0])


def test_a_text_in_the_place_of_another(cuda, tmp_path, monkeypatch):
    (tmp_path / "k.cu").write_text(AXPY.replace("+=", "-="))
    monkeypatch.setenv("EMULATED_CUDA_TEXTS", str(tmp_path))
    y, x = cuda.put([1.0]), cuda.put([1.0])
    cuda.launch(cuda.compile(AXPY, "axpy"), [1], [32], y, x, 3.0, 1)
    assert cuda.get(y, 1) == [-2.0]


def test_a_text_that_does_not_compile(cuda):
    with pytest.raises(CudaError, match=r"(?s)NVRTC_ERROR_COMPILATION: .*kernel.cu:2.*nothing"):
        cuda.compile('\nextern "C" __global__ void f() { nothing(); }', "f")


def test_a_kernel_that_is_not_there(cuda):
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND: the module has no kernel other"):
        cuda.compile(AXPY, "other")


@pytest.mark.parametrize(
    ("body", "ends_by"),
    [
        ("*reinterpret_cast<float4*>(x + 1) = float4();", signal.SIGILL),
        (
            "EMULATED_SHARED(m); reinterpret_cast<float*>(m)[4 + threadIdx.x] = 1.0f;",
            signal.SIGSEGV,
        ),
    ],
    ids=["unaligned", "behind shared memory"],
)
def test_accesses_that_trap(body, ends_by):
    program = f"""
from emulated.cuda_driver import Driver
cuda = Driver()
text = 'extern "C" __global__ void bad(float* x) {{ {body} }}'
cuda.launch(cuda.compile(text, "bad"), [1], [1], cuda.put([0.0] * 8), shared=16)
cuda.check(cuda.cu.cuCtxSynchronize())
"""
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(here)}
    )
    assert done.returncode == -ends_by


def test_the_log_has_a_line_for_each_launch(cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("EMULATED_CUDA_LOG", str(tmp_path / "launches"))
    y = cuda.put([1.0])
    cuda.launch(cuda.compile(AXPY, "axpy"), [2, 3], [64], y, y, 1.0, 1, shared=32)
    assert (tmp_path / "launches").read_text() == "axpy <<<2,3,1 | 64,1,1 | 32>>>\n"


def test_one_library_stands_for_both():
    assert cuda_driver.library().is_file()
