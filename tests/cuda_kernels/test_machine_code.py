"""Texts of the generator as machine code: no spills, no local memory, and 16 bytes at a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_cases
import model_texts
import pytest
import regions
import torch
from gate import ARCHITECTURES, Built, accesses, compile_texts, faults, instructions, reads_at_once

pytestmark = pytest.mark.cuda
# Whose operands do not lie so that 16 bytes could be read or written.
NARROW_CASES = {"strided": 2, "batch_norm": 1, "loss_of_many_rows": 1}


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


# The loads of 16 bytes that a thread starts at once: of a whole row, or of a step of a loop.
READS = {
    "softmax": (functools.partial(kernel_cases.softmax, 5, 16000), 8),
    "softmax_of_short_floats": (
        functools.partial(kernel_cases.softmax, 5, 16000, torch.bfloat16),
        4,
    ),
    "softmax_of_long_rows": (functools.partial(kernel_cases.softmax, 5, 17000), 2),
    "norm_of_split_rows": (functools.partial(kernel_cases.norm_dropout, 3, 66048), 6),
}


@pytest.mark.parametrize("name", READS)
def test_threads_read_before_they_compute(name, tmp_path):
    """A thread that waited for each vector would use a part of the memory's bandwidth."""
    make, loads = READS[name]
    made = make()
    compiled = regions.Compiled(made.graph(), regions.CUDA, kernel_dump_dir=str(tmp_path))
    compiled.run(made.given())
    (path,) = tmp_path.glob("*.cu")
    for built in compile_texts({path.stem: path.read_text()}):
        assert reads_at_once(built) >= loads, built.architecture


@pytest.mark.parametrize("case", ["bias_dropout", "batch_norm", "channel_sums"])
def test_integers_are_not_divided(case, tmp_path):
    """A division takes 20 instructions, as many as all else that a thread does for an element."""
    made = kernel_cases.CASES[case]()
    compiled = regions.Compiled(made.graph(), regions.CUDA, kernel_dump_dir=str(tmp_path))
    compiled.run(made.given())
    (path,) = tmp_path.glob("*.cu")
    text = path.read_text().partition("// Adds up the partial sums")[0]
    for built in compile_texts({path.stem: text}):
        assert not any(name.startswith(("I2F", "CALL")) for name in instructions(built))


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
        assert found_in(texts) == []
