"""The real NVRTC compiles texts without a driver, and the gate on machine code lets no fault by."""

from __future__ import annotations

import functools

import pytest
from gate import ARCHITECTURES, TOOLKITS, Built, compile_texts, faults, instructions, nvdisasm
from in_process import AXPY, run

COPY = """
struct alignas(16) Four { float x, y, z, w; };
extern "C" __global__ void __launch_bounds__(256) copy(Four* to, const Four* from, long long n) {
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  if (i < n) to[i] = from[i];
}
"""
TEXTS = {
    "axpy": AXPY,
    "copy": COPY,
    # Sixteen bytes that the compiler may not take at once.
    "narrow": COPY.replace("alignas(16)", "alignas(4)"),
    # An array whose elements are chosen by a number that is not known.
    "array": """
extern "C" __global__ void array(float* to, const float* from, const int* places) {
  float held[128];
  for (int i = 0; i < 128; ++i) held[i] = from[i * 128 + threadIdx.x];
  for (int i = 0; i < 8; ++i) held[places[i * 128 + threadIdx.x]] *= 2;
  to[threadIdx.x] = held[places[threadIdx.x]];
}
""",
    # More numbers at once than 32 registers hold.
    "spill": """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* to, const float* from) {
  float held[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) held[i] = from[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; ++i) to[(47 - i) * 1024 + threadIdx.x] = held[i] * held[(i * 7) % 48];
}
""",
}


@functools.cache
def built() -> dict[tuple[str, str], Built]:
    return {(each.name, each.architecture): each for each in compile_texts(TEXTS)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestGate:
    def test_good_code_passes(self, architecture):
        assert faults(built()["axpy", architecture]) == []
        assert faults(built()["copy", architecture], wide_loads=1, wide_stores=1) == []
        assert instructions(built()["axpy", architecture])["EXIT"] >= 1

    def test_narrow_accesses(self, architecture):
        found = faults(built()["narrow", architecture], wide_loads=1, wide_stores=1)
        start = f"narrow for {architecture}: "
        assert found == [f"{start}0 LDG of 16 bytes, want 1", f"{start}0 STG of 16 bytes, want 1"]
        assert faults(built()["narrow", architecture]) == []

    def test_an_array_in_local_memory(self, architecture):
        first, second = faults(built()["array", architecture])
        assert first == f"array for {architecture}: array has 512 bytes of local memory"
        assert second.startswith(f"array for {architecture}: local memory is used: LDL")

    def test_spills(self, architecture):
        first, second = faults(built()["spill", architecture])
        assert first.startswith(f"spill for {architecture}: spill spills ")
        assert second.startswith(f"spill for {architecture}: local memory is used: LDL")


def test_a_log_without_words_of_ptxas_is_a_fault():
    one = built()["axpy", "sm_90"]
    (found,) = faults(Built("axpy", "sm_90", one.cubin, ""))
    assert found == "axpy for sm_90: ptxas says nothing of any function"


def test_nvrtc_compiles_anew_what_it_has_compiled_before(monkeypatch):
    """Its own cache, which it has where there is a driver, keeps no words of ptxas."""
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "0")
    for _ in range(2):
        (one,) = compile_texts({"copy": COPY}, ["sm_90"])
        assert faults(one) == []
    given = []
    monkeypatch.setattr("gate.run", lambda code, **settings: given.append(settings))
    monkeypatch.setattr("gate.pickle.loads", lambda data: {})
    compile_texts({"copy": COPY}, ["sm_90"])
    assert given == [{"fake": False, "CUDA_CACHE_DISABLE": "1"}]


class TestDisassembler:
    @pytest.fixture(autouse=True)
    def nowhere(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setenv("PATH", "/none")
        for name in TOOLKITS:
            monkeypatch.delenv(name, raising=False)

    @pytest.fixture
    def tool(self, tmp_path):
        path = tmp_path / "bin" / "nvdisasm"
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    @pytest.mark.parametrize("variable", TOOLKITS)
    def test_of_a_toolkit(self, variable, tool, monkeypatch):
        monkeypatch.setenv(variable, str(tool.parents[1]))
        assert nvdisasm() == str(tool)

    def test_of_the_path(self, tool, monkeypatch):
        monkeypatch.setenv("CUDA_HOME", "/none")
        monkeypatch.setenv("PATH", str(tool.parent))
        assert nvdisasm() == str(tool)

    def test_none(self):
        with pytest.raises(AssertionError, match="no nvdisasm"):
            nvdisasm()


def test_without_nvrtc_the_gate_fails():
    words = r"cuda: no NVRTC: /none\.so: cannot open .* \(pip install nvidia-cuda-nvrtc\)"
    with pytest.raises(AssertionError, match=words):
        compile_texts({"axpy": AXPY}, TORCH_ORT_NVRTC="/none.so")


def test_the_compiler_is_the_one_of_the_packages():
    path, version = run("print(*cuda.compiler())", fake=False).split()
    assert path.endswith("/nvidia/cu13/lib/libnvrtc.so.13")
    assert version == "13.0"


def test_what_nvrtc_says_of_a_bad_text():
    words = run(
        """
        text = "extern \\"C\\" __global__ void broken() { int x = nothing; }"
        print(refused(Unsupported, cuda.compile("broken", text, "sm_80").wait))
        print(refused(Unsupported, cuda.compile("axpy", AXPY, "sm_12").wait))
        """,
        fake=False,
    )
    first, *lines = words.splitlines()
    start = "cuda: kernel 'broken' does not compile with NVRTC 13.0 and -arch=sm_80: "
    assert first == f"{start}NVRTC_ERROR_COMPILATION"
    assert lines[0] == 'broken.cu(1): error: identifier "nothing" is undefined'
    assert "and -arch=sm_12: NVRTC_ERROR_INVALID_OPTION" in words


def test_what_ptxas_says_is_told_before_warnings():
    """It comes last, after warnings of the text."""
    words = run(
        r"""
        text = '''
        extern "C" __global__ void broken(int* x) {
          int a, b, c, d, e, f, g, h;
          asm("nothing;");
          *x = 1;
        }'''
        print(refused(Unsupported, cuda.compile("broken", text, "sm_90").wait))
        """,
        fake=False,
    )
    first, *lines = words.splitlines()
    assert first.endswith("NVRTC_ERROR_COMPILATION")
    assert "Not a name of any known instruction: 'nothing'" in lines[0]
    assert not any("warning" in line for line in lines), words


def test_what_texts_do_not_call_is_no_warning(tmp_path):
    (log,) = run(
        """
        text = "static __device__ int unused() { return 1; }" + AXPY
        print(repr(cuda.compile("axpy", text, "sm_90").wait()[1]))
        """,
        fake=False,
    ).splitlines()
    assert "never referenced" not in log
    assert "Used" in log


def test_cubins_are_kept_without_a_driver(tmp_path):
    code = """
        (cubin, log) = cuda.compile("axpy", AXPY, "sm_90").wait()
        assert cubin.startswith(b"\\x7fELF")
        assert "Compiling entry function 'axpy' for 'sm_90'" in log
        print(cuda.build_counts())
    """
    settings = {
        "TORCH_ORT_KERNEL_CACHE_DIR": str(tmp_path / "folder"),
        "TORCH_ORT_KERNEL_CACHE_BYTES": str(1 << 20),
    }
    assert run(code, fake=False, **settings) == "{'compiled': 1, 'found_on_disk': 0}\n"
    assert run(code, fake=False, **settings) == "{'compiled': 0, 'found_on_disk': 1}\n"
