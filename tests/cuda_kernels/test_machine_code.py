"""Texts of the generator as machine code: no spills, no local memory, and 16 bytes at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_cases
import model_texts
import pytest
import regions
from gate import ARCHITECTURES, Built, accesses, compile_texts, faults

pytestmark = pytest.mark.cuda
# Whose operands do not lie so that 16 bytes could be read or written.
NARROW_CASES = {
    "strided": 2,
    "batch_norm": 1,
    "loss_of_many_rows": 1,
}


def texts_of_cases(folder: Path) -> dict[str, str]:
    for name, make in kernel_cases.CASES.items():
        case = make()
        settings = {"kernel_dump_dir": str(folder / name)}
        compiled = regions.Compiled(case.graph(), regions.CUDA, **settings)
        compiled.run(case.given())
        if case.tells_fault:
            with pytest.raises(IndexError):
                compiled.run(case.given())
    return {path.parent.name: path.read_text() for path in folder.glob("*/*.cu")}


def found_in(texts: Mapping[str, str], architectures: Sequence[str] = ARCHITECTURES) -> list[str]:
    """List the faults of all texts, as each architecture has them."""

    def look(built: Built) -> list[str]:
        want = accesses(texts[built.name])
        return faults(built, want.wide_loads, want.wide_stores)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(look, compile_texts(texts, architectures)))
    return [fault for each in found for fault in each]


@pytest.mark.parametrize(
    "architecture",
    ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_100"))],
)
def test_cases(architecture, tmp_path):
    texts = texts_of_cases(tmp_path)
    assert len(texts) == len(kernel_cases.CASES)
    narrow = {name: len(accesses(text).narrow) for name, text in texts.items()}
    assert {name: count for name, count in narrow.items() if count} == NARROW_CASES
    assert found_in(texts, [architecture]) == []


@pytest.fixture(scope="module")
def plain_text(tmp_path_factory) -> str:
    case = kernel_cases.bias_dropout(37, 72)
    folder = tmp_path_factory.mktemp("texts")
    regions.Compiled(case.graph(), regions.CUDA, kernel_dump_dir=str(folder)).run(case.given())
    (path,) = folder.glob("*.cu")
    return path.read_text()


def test_planted_faults(plain_text):
    """The gate sees what is wrong in a text of the generator's that is changed a little."""
    spill = re.sub(r"__launch_bounds__\(256\)", "__launch_bounds__(1024, 2)", plain_text)
    spill = spill.replace(
        "  for (index_t line",
        """  float held[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) held[i] = in0[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) out0[(63 - i) * 1024 + threadIdx.x] = held[i] * held[i * 7 % 64];
  for (index_t line""",
        1,
    )
    local = plain_text.replace(
        "  for (index_t line",
        "  float held[64];\n  for (int i = 0; i < 64; ++i) held[i] = in0[i];\n"
        "  out0[threadIdx.x] = held[columns % 64];\n  for (index_t line",
        1,
    )
    narrow = re.sub(r"struct __align__\(.*\) Pack", "struct Pack", plain_text)
    single = re.sub(
        r"load\((v\d+), (at\d+) \+ column\)",
        r"load_each(\1, \2, [\&](int i) { return (column + i); })",
        plain_text,
    )
    texts = {"plain": plain_text, "spill": spill, "local": local, "narrow": narrow}
    found = {name: found_in({"text": text}) for name, text in texts.items()}
    assert found["plain"] == []
    assert any("spills" in fault for fault in found["spill"])
    assert any("of local memory" in fault for fault in found["local"])
    assert any("LDG of 16 bytes" in fault for fault in found["narrow"])
    assert any("STG of 16 bytes" in fault for fault in found["narrow"])
    assert accesses(plain_text).narrow == ()
    assert accesses(single).narrow == ("in0 by elements",)


@pytest.mark.slow
@pytest.mark.parametrize("name", model_texts.MODELS)
def test_models(name, tmp_path):
    model = model_texts.MODELS[name]
    for dtype in model_texts.DTYPES:
        texts = model_texts.texts_of(model, dtype, tmp_path / str(dtype))
        assert len(texts) >= 3
        narrow = [
            f"{kernel}: {each}" for kernel, text in texts.items() for each in accesses(text).narrow
        ]
        assert len(narrow) <= model.narrow, narrow
        found = found_in(texts)
        kernels = [fault.partition(" for ")[0] for fault in found]
        spilling = {
            kernel for kernel, fault in zip(kernels, found, strict=True) if "spills" in fault
        }
        assert len(spilling) <= model.spilling, found
        assert spilling.issuperset(kernels), found
