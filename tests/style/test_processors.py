"""What one kind of processor has stands in the files that name an instruction set, and in the loops
that are compiled for each: the rest of csrc/ builds and runs on any.
"""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp"})

NAMES_A_SET = re.compile(r"cpu/(kernels_(portable|avx|neon)\w*\.cpp|isa\.cpp|\w+_loops\.h)$")
OF_ONE_KIND = re.compile(
    r"""
    \b[a-z]*(intrin|arm_neon|arm_sve|arm_acle|cpuid|hwcap)\.h\b  # headers
    | \b_mm\d*_\w+ | \b__m\d+\w* | \bv(ld|st)\d\w*_[fusb]\d+ | \bfloat\d+x\d+_t  # vectors
    | \b__builtin_(cpu_|ia32_|aarch64_)\w+ | \bgetauxval\b
    | \b__(x86_64|i386|aarch64|arm|SSE\w*|AVX\w*|ARM_\w+)__\b
    | \basm\b(?!\s*(volatile)?\s*\(""\s*:)  # an empty one only keeps compilers from moving code
    """,
    re.VERBOSE,
)


def of_one_kind(text: str) -> list[str]:
    """List what only some processors have in a file, without its comments."""
    code = re.sub(r"//[^\n]*", "", text)
    return [match.group() for match in OF_ONE_KIND.finditer(code)]


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not NAMES_A_SET.search(path.as_posix())],
    ids=lambda path: str(path.relative_to(CSRC)),
)
def test_a_file_is_for_any_processor(path: Path) -> None:
    assert of_one_kind(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("#include <immintrin.h>", "immintrin.h"),
        ("#include <arm_neon.h>", "arm_neon.h"),
        ("#if defined(__aarch64__)", "__aarch64__"),
        ("sum = _mm256_add_ps(a, b);", "_mm256_add_ps"),
        ("__m256 sum;", "__m256"),
        ("float32x4_t sum;", "float32x4_t"),
        ("x = vld1q_f32(from);", "vld1q_f32"),
        ('__builtin_cpu_supports("avx2")', "__builtin_cpu_supports"),
        ('asm("yield");', "asm"),
    ],
)
def test_what_is_found(line: str, found: str) -> None:
    assert found in of_one_kind(line)


@pytest.mark.parametrize("line", ['asm volatile("" ::: "memory");', "// as __m256", "vstack(a)"])
def test_what_is_not(line: str) -> None:
    assert of_one_kind(line) == []
