"""libcuda and NVRTC are found, or the reason why not is told in the same words each time."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
from pathlib import Path

import pytest
from in_process import run

MISSING = """
    first = cuda.missing()
    print(first)
    assert cuda.missing() == first
    assert refused(Unsupported, lambda: cuda.device(0)) == first
    assert refused(Unsupported, lambda: cuda.build("axpy", AXPY)) == first
"""


def library_of(folder: Path, source: str) -> str:
    """Build a library from C++."""
    code, path = folder / "library.cpp", folder / "library.so"
    code.write_text(source)
    command = [*os.environ.get("CXX", "c++").split(), "-shared", "-fPIC", code, "-o", path]
    subprocess.run(command, check=True)
    return str(path)


def test_a_driver_that_is_there():
    words = run("""
        assert cuda.missing() == ""
        device = cuda.device(0)
        print(device.name, device.architecture, device.num_multiprocessors, device.max_shared_bytes)
        path, version = cuda.compiler()
        print(version)
    """)
    assert words.split("\n")[:2] == [f"emulated device sm_90 4 {227 << 10}", "13.0"]


@pytest.mark.parametrize(("major", "regions"), [("9", 3), ("8", 3), ("7", 2)])
def test_gpus_without_bfloat16_leave_it_to_pytorch(major, regions):
    run(
        f"""
        import regions, torch
        fused = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = {{"x": regions.type_text(dtype, ("N",))}}
            graph = regions.read(x, ["a = Exp (x)", "y = Tanh (a)"], ["y"])
            fused += regions.ops(regions.fuse(regions.on_cuda(graph)))
        assert fused.count("Region") == {regions}, fused
        """,
        EMULATED_CUDA_MAJOR=major,
    )


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_no_driver():
    words = run(MISSING, fake=False)
    assert words.startswith("cuda: no driver: libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize("name", ["LIBCUDA", "NVRTC"])
def test_a_path_that_leads_nowhere(name, tmp_path):
    path = str(tmp_path / "none.so")
    words = run(MISSING, **{f"TORCH_ORT_{name}": path})
    what = {"LIBCUDA": "driver", "NVRTC": "NVRTC"}[name]
    assert words.startswith(f"cuda: no {what}: {path}: cannot open shared object file")


@pytest.mark.parametrize(("name", "function"), [("LIBCUDA", "cuInit"), ("NVRTC", "nvrtcVersion")])
def test_a_library_that_is_another(name, function, tmp_path):
    path = library_of(tmp_path, 'extern "C" int something() { return 0; }')
    words = run(MISSING, **{f"TORCH_ORT_{name}": path})
    what = {"LIBCUDA": "driver", "NVRTC": "NVRTC"}[name]
    assert words.strip() == f"cuda: {what}: unsupported version: {path} has no function {function}"


NVRTC = """
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = MAJOR; *minor = 8; return 0; }
const char* nvrtcGetErrorString(int) { return ""; }
int nvrtcCreateProgram() { return 1; }
int nvrtcCompileProgram() { return 1; }
int nvrtcGetProgramLogSize() { return 1; }
int nvrtcGetProgramLog() { return 1; }
int nvrtcGetCUBINSize() { return 1; }
int nvrtcGetCUBIN() { return 1; }
int nvrtcDestroyProgram() { return 1; }
}
"""


@pytest.mark.parametrize(
    ("major", "words"),
    [
        (11, "is too old: got NVRTC 11.8, want 12.0 or later; TORCH_ORT_NVRTC names one"),
        (14, "is too new for the driver: got NVRTC 14.8, want 13.x; TORCH_ORT_NVRTC names one"),
    ],
)
def test_nvrtc_of_a_version_that_does_not_do(major, words, tmp_path):
    path = library_of(tmp_path, NVRTC.replace("MAJOR", str(major)))
    assert run(MISSING, TORCH_ORT_NVRTC=path).strip() == f"cuda: {path} {words}"


def test_a_cubin_that_the_driver_does_not_take(tmp_path):
    source = NVRTC.replace("MAJOR", "13").replace("return 1", "return 0")
    source = source.replace("LogSize()", "LogSize(void*, unsigned long* size)")
    source = source.replace("CUBINSize()", "CUBINSize(void*, unsigned long* size)")
    source = source.replace("size) { return 0", "size) { *size = 4; return 0")
    words = run(
        """print(refused(Unsupported, cuda.build("axpy", AXPY).wait))""",
        TORCH_ORT_NVRTC=library_of(tmp_path, source),
    )
    assert words.startswith("cuda: load of 'axpy' for sm_90: CUDA_ERROR_INVALID_IMAGE (")


@pytest.mark.parametrize(
    ("of_torch", "found"), [("12.8", "12.8"), ("13.0", "13.8"), (None, "13.8")]
)
def test_nvrtc_is_of_pytorchs_version_where_there_are_two(of_torch, found, tmp_path):
    for major, parts in ((12, "cuda_nvrtc/lib"), (13, "cu13/lib")):
        folder = tmp_path / "nvidia" / parts
        folder.mkdir(parents=True)
        path = library_of(tmp_path, NVRTC.replace("MAJOR", str(major)))
        Path(path).rename(folder / f"libnvrtc.so.{major}")
    words = run(
        f"""
        import sys, torch
        from torch_ort.engine.cuda import _nvrtc_folders
        sys.path.insert(0, {str(tmp_path)!r})
        torch.version.cuda = {of_torch!r}
        _nvrtc_folders.cache_clear()
        configure()
        print(cuda.compiler()[1])
        """,
        fake=False,
    )
    assert words.strip() == found


def test_a_library_that_another_package_has_loaded_does_not_win(tmp_path):
    """PyTorch's own comes first: the driver may be too old for a newer one."""
    folder = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    folder.mkdir(parents=True)
    own = library_of(tmp_path, NVRTC.replace("MAJOR", "12"))
    Path(own).rename(folder / "libnvrtc.so.12")
    (tmp_path / "other").mkdir()
    other = Path(library_of(tmp_path / "other", NVRTC.replace("MAJOR", "13")))
    other = other.rename(other.with_name("libnvrtc.so.13"))
    words = run(
        f"""
        import ctypes, sys, torch
        from torch_ort.engine.cuda import _nvrtc_folders
        loaded = ctypes.CDLL({str(other)!r}, mode=ctypes.RTLD_GLOBAL)
        sys.path.insert(0, {str(tmp_path)!r})
        torch.version.cuda = "12.8"
        _nvrtc_folders.cache_clear()
        configure()
        print(cuda.compiler()[1])
        """,
        fake=False,
    )
    assert words.strip() == "12.8"


DRIVER = """
extern "C" {
int cuInit(unsigned) { return INIT; }
int cuDeviceGetCount(int* count) { *count = 0; return 0; }
int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int, const char** text) { *text = "no CUDA-capable device"; return 0; }
"""
OTHER_FUNCTIONS = (
    "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuModuleLoadData",
    "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute",
    "cuLaunchKernel", "cuStreamSynchronize", "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode", "cuMemHostAlloc", "cuMemFreeHost",
    "cuMemHostGetDevicePointer_v2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (0, "cuda: no device: the driver reports 0 devices"),
        (100, "cuda: no device: CUDA_ERROR_NO_DEVICE (no CUDA-capable device)"),
    ],
)
def test_no_device(init, words, tmp_path):
    others = "".join(f"int {name}() {{ return 1; }}\n" for name in OTHER_FUNCTIONS)
    path = library_of(tmp_path, DRIVER.replace("INIT", str(init)) + others + "}")
    assert run(MISSING, TORCH_ORT_LIBCUDA=path).strip() == words


def test_paths_are_fixed_once_they_are_used():
    words = run("""
        import os
        cuda.device(0)
        configure()
        os.environ["TORCH_ORT_NVRTC"] = "/another.so"
        print(refused(UserError, configure))
    """)
    assert "cuda: nvrtc: got '/another.so', want '" in words


def test_nothing_is_opened_before_it_is_needed():
    run("""
        import os
        os.environ["TORCH_ORT_NVRTC"] = "/another.so"
        configure()
    """)


def test_a_forked_process_cannot_go_on():
    words = run("""
        import os
        module = cuda.build("axpy", AXPY)
        module.wait()
        word = cuda.HostWord()
        if os.fork() == 0:
            try:
                print(refused(DeviceError, lambda: cuda.device(0)), flush=True)
                print(refused(DeviceError, lambda: cuda.build("axpy", AXPY)), flush=True)
                print(refused(DeviceError, module.wait), flush=True)
                print(refused(DeviceError, lambda: axpy(module, 0, 0, 1.0, 1)), flush=True)
                print(cuda.missing(), flush=True)
                del module, word
                cuda.stop_working()
            finally:
                os._exit(0)
        _, status = os.wait()
        assert status == 0
        module.wait()  # all is well in the first process
        cuda.HostWord()
    """)
    lines = words.splitlines()
    assert len(lines) == 5
    assert set(lines) == {
        "cuda: this process was forked from one that had used CUDA, and cannot use it; start it "
        "with the method 'spawn' or 'forkserver'"
    }


def test_without_a_driver_a_forked_process_is_told_the_same(tmp_path):
    words = run(
        """
        import os
        print(cuda.missing(), flush=True)
        if os.fork() == 0:
            print(refused(Unsupported, lambda: cuda.device(0)), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
        """,
        TORCH_ORT_LIBCUDA=str(tmp_path / "none.so"),
    )
    first, second = words.splitlines()
    assert first == second
    assert first.startswith("cuda: no driver: ")


def test_a_process_that_is_forked_before_may_use_it():
    run("""
        import os
        if os.fork() == 0:
            cuda.build("axpy", AXPY).wait()
            os._exit(0)
        assert os.wait()[1] == 0
    """)


SAID = """
    import logging, sys, torch
    from torch_ort.engine import cuda
    from torch_ort.engine.program import Program

    class Graph:
        def types(self):
            return {{"x": ("float", [2], [1], "{device}"), "seed": ("int64", [], [], "cpu")}}

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    torch.cuda.is_available = lambda: True
    cuda._has_wide_products = lambda: False
    program = Program(graph=Graph(), constants={{}}, is_training=False)
    for _ in range(2):
        cuda.look_at_device(program)
"""


def test_what_is_missing_is_said_once(tmp_path):
    path = str(tmp_path / "none.so")
    words = run(SAID.format(device="cuda:0"), TORCH_ORT_LIBCUDA=path)
    assert words == (
        "WARNING torch_ort.cuda: nothing is fused on CUDA, where PyTorch's kernels run: cuda: no "
        f"driver: {path}: cannot open shared object file: No such file or directory\n"
    )
    assert run(SAID.format(device="cpu"), TORCH_ORT_LIBCUDA=path) == ""
    assert run(SAID.format(device="cuda:0")) == ""


def test_a_cache_that_cannot_be_is_said_once(tmp_path):
    file = tmp_path / "file"
    file.touch()
    settings = {"TORCH_ORT_KERNEL_CACHE_DIR": str(file), "TORCH_ORT_KERNEL_CACHE_BYTES": "1000000"}
    assert run(SAID.format(device="cuda:0"), **settings) == (
        f"WARNING torch_ort.cuda: kernels are built anew in each process: {file}: Not a directory\n"
    )
