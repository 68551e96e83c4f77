"""Kernels are launched on any thread, and what goes wrong is told by the kernel's name."""

from __future__ import annotations

import pytest
from in_process import run


def test_a_kernel_runs():
    run("""
        y, x = fake.put([1.0] * 100), fake.put([float(i) for i in range(100)])
        module = cuda.build("axpy", AXPY)
        axpy(module, y.value, x.value, 0.5, 100)
        cuda.synchronize()
        assert fake.get(y, 100) == [1 + i / 2 for i in range(100)]
    """)


def test_a_stream():
    run("""
        import ctypes
        y, x, stream = fake.put([1.0]), fake.put([1.0]), ctypes.c_void_p()
        fake.check(fake.cu.cuStreamCreate(ctypes.byref(stream), 1))
        module = cuda.build("axpy", AXPY)
        axpy(module, y.value, x.value, 1.0, 1, stream=stream.value)
        cuda.synchronize()
        assert fake.get(y, 1) == [1.0]  # another stream was waited for
        cuda.synchronize(stream=stream.value)
        assert fake.get(y, 1) == [2.0]
    """)


def test_threads_need_no_context_and_keep_what_they_have():
    run("""
        import ctypes, threading
        y, x = fake.put([0.0]), fake.put([1.0])
        module, errors = cuda.build("axpy", AXPY), []

        def current():
            context = ctypes.c_void_p()
            fake.cu.cuCtxGetCurrent(ctypes.byref(context))
            return context.value

        def work():
            try:
                assert current() is None
                for _ in range(50):
                    axpy(module, y.value, x.value, 1.0, 1)
                assert current() is None
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not errors, errors
        cuda.synchronize()
        assert fake.get(y, 1) == [400.0]
    """)


SHARED = """
extern "C" __global__ void shares(float* y) {
  EMULATED_SHARED(memory);
  memory[SIZE - 1] = 1;
  y[0] = memory[SIZE - 1];
}
"""


def test_shared_memory_needs_no_asking():
    size = 227 << 10
    run(f"""
        y = fake.put([0.0])
        module = cuda.build("shares", {SHARED.replace("SIZE", str(size))!r})
        module.launch("shares", (1, 1, 1), (1, 1, 1), [struct.pack("P", y.value)], {size})
        cuda.synchronize()
        assert fake.get(y, 1) == [1.0]
    """)


@pytest.mark.parametrize(
    ("geometry", "said", "words"),
    [
        ("(1, 1, 1), (64, 1, 1)", "grid (1, 1, 1), block (64, 1, 1)", "more shared memory"),
        ("(1, 1, 1), (2048, 1, 1)", "grid (1, 1, 1), block (2048, 1, 1)", "the block is too large"),
        ("(0, 1, 1), (64, 1, 1)", "grid (0, 1, 1), block (64, 1, 1)", "a dimension is 0"),
    ],
)
def test_a_launch_that_is_refused(geometry, said, words):
    shared = (228 << 10) if "shared" in words else 0
    told = run(f"""
        y = fake.put([1.0])
        module = cuda.build("axpy", AXPY)
        arguments = [struct.pack("P", y.value)] * 2 + [struct.pack("i", 0)] * 2
        print(refused(InternalError, lambda: module.launch(
            "axpy", {geometry}, arguments, {shared})))
        axpy(module, y.value, y.value, 1.0, 1)  # the context is as it was
        cuda.synchronize()
        assert fake.get(y, 1) == [2.0]
    """)
    start = f"cuda: launch of 'axpy' with {said}, {shared} bytes of shared memory: "
    assert told.startswith(f"{start}CUDA_ERROR_INVALID_VALUE (axpy ")
    assert words in told


def test_a_kernel_that_fails_is_named_once_and_for_all():
    told = run("""
        text = '''
        extern "C" __global__ void hangs(float* x) { if (threadIdx.x == 0) __syncthreads(); }
        '''
        y = fake.put([1.0])
        module, hangs = cuda.build("axpy", AXPY), cuda.build("hangs", text)
        module.info("axpy")
        hangs.launch("hangs", (1, 1, 1), (8, 1, 1), [struct.pack("P", y.value)])
        print(refused(DeviceError, lambda: cuda.synchronize(what="step 'gelu_7'")))
        print(refused(DeviceError, lambda: axpy(module, y.value, y.value, 1.0, 1)))
        print(refused(DeviceError, lambda: cuda.build("other", AXPY + "//").wait()))
        print(refused(DeviceError, cuda.HostWord))
    """)
    first, *others = told.splitlines()
    name = "CUDA_ERROR_LAUNCH_FAILED (hangs: "
    assert first.startswith(f"cuda: step 'gelu_7': {name}")
    assert first.endswith(
        ": this or an earlier kernel has failed, and nothing runs on the device any more; "
        "TORCH_ORT_CHECK=2 waits for each step and names the one that fails"
    )
    whats = ("launch of 'axpy' with grid", "load of 'other' for sm_90", "4 bytes of host memory")
    for line, what in zip(others, whats, strict=True):
        assert line.startswith(f"cuda: {what}")
        assert f": nothing runs on the device any more; first noticed at step 'gelu_7': {name}" in (
            line
        )


def test_a_kernel_that_is_not_there():
    words = run("""
        module = cuda.build("axpy", AXPY)
        print(refused(InternalError, lambda: module.info("axpby")))
        assert module.info("axpy").max_threads == 1024
    """)
    assert words.startswith("cuda: kernel 'axpby': CUDA_ERROR_NOT_FOUND (")


def test_a_device_that_is_not_there():
    words = run("""print(refused(InternalError, lambda: cuda.device(1)))""")
    assert words.strip() == "cuda: no such device: got 1, want one of 1"


def test_a_word_that_kernels_write():
    run("""
        text = '''
        extern "C" __global__ void tells(unsigned* word) { atomicMax(word, 3 + blockIdx.x); }
        '''
        module, word = cuda.build("tells", text), cuda.HostWord()
        assert word.take() == 0
        module.launch("tells", (2, 1, 1), (1, 1, 1), [struct.pack("P", word.device)])
        assert word.take() == 0  # nobody has waited for the kernel
        cuda.synchronize()
        assert word.take() == 4
        assert word.take() == 0
    """)
