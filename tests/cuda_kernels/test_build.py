"""Kernels are built once in a process, on threads, and told of by name where they cannot be."""

from __future__ import annotations

import os
from pathlib import Path

from in_process import environment, program, run
from own_process import run_python

TESTS = Path(__file__).parents[1]


def test_equal_texts_are_built_once_whoever_asks():
    run("""
        import threading
        modules = []

        def work():
            module = cuda.build("axpy", AXPY)
            module.wait()
            modules.append(module)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(modules) == 8
        assert all(each is modules[0] for each in modules)
        assert cuda.build_counts() == {"compiled": 1, "found_on_disk": 0}
        assert cuda.build("another name", AXPY) is modules[0]
        assert cuda.build("axpy", AXPY + "// longer") is not modules[0]
        assert cuda.build("axpy", AXPY, flags=["-DX"]) is not modules[0]
    """)


def test_building_begins_before_anybody_waits():
    run("""
        modules = [cuda.build("axpy", AXPY + f"// {i}") for i in range(6)]
        while not all(each.is_ready() for each in modules):
            pass
        assert cuda.build_counts()["compiled"] == 6
    """)


def test_a_text_that_does_not_compile():
    words = run("""
        text = "extern \\"C\\" __global__ void broken() { int x = nothing; }"
        module = cuda.build("broken", text)
        first = refused(Unsupported, module.wait)
        print(first)
        assert refused(Unsupported, module.wait) == first
        cuda.build("axpy", AXPY).wait()
        assert cuda.build_counts()["compiled"] == 1
    """)
    start = "cuda: kernel 'broken' does not compile with NVRTC 13.0 and -arch=sm_90: "
    assert words.startswith(f"{start}NVRTC_ERROR_COMPILATION\n")
    assert "kernel.cu:1:47: error: " in words
    assert len(words.splitlines()) <= 7


def test_kernels_are_loaded_while_a_graph_is_captured():
    """Neither they nor the word for faults are a part of what the user captures."""
    run(
        """
        y, x = fake.put([1.0, 2.0]), fake.put([3.0, 4.0])
        axpy(cuda.build("axpy", AXPY), y.value, x.value, 2.0, 2)
        assert cuda.HostWord().take() == 0
        assert fake.get(y, 2) == [7.0, 10.0]
        # Who does not ask is refused.
        import ctypes
        found = ctypes.c_void_p()
        assert fake.cu.cuMemHostAlloc(ctypes.byref(found), 8, 0) == 900
        """,
        EMULATED_CUDA_CAPTURING="1",
    )


def test_a_process_that_ends_while_kernels_are_built():
    code = program("""
        for i in range(12):
            cuda.build("axpy", AXPY + f"// {os.getpid()} {i}")
    """)
    done = run_python(
        "-c",
        "import os\n" + code,
        env={**environment(), "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_texts_are_dumped_under_their_names(tmp_path):
    folder = tmp_path / "dumps"
    run(f"""
        for text in (AXPY, AXPY + "// 2", AXPY, AXPY + "// 2"):
            cuda.build("axpy", text, dump_dir={str(folder)!r})
        cuda.build("other", AXPY, dump_dir={str(folder)!r})
        cuda.build("none", AXPY)
    """)
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == ["axpy.cu", "axpy_2.cu", "other.cu"]
    assert texts["axpy.cu"] + "// 2" == texts["axpy_2.cu"]
    assert texts["other.cu"] == texts["axpy.cu"]


def test_a_dump_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    words = run(f"""
        build = lambda: cuda.build("axpy", AXPY, dump_dir={str(tmp_path / "file")!r})
        print(refused(UserError, build))
    """)
    assert words.strip() == f"dump_dir: cannot write: got {tmp_path / 'file' / 'axpy.cu'}"
