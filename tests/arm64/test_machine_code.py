"""The inner loops of products for NEON, as the compiler wrote them: how many multiplications there
are for each load. They are slower than the processor where loads, or spilt sums, outnumber these.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

OBJDUMP = "aarch64-linux-gnu-objdump"
OBJECTS = Path(__file__).parents[2] / "build/arm64/build/CMakeFiles/torch_ort_cpu.dir/csrc/cpu"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (OBJECTS.exists() and shutil.which(OBJDUMP)),
        reason=f"needs {OBJDUMP} and build/arm64: run `make test-arm64`",
    ),
]

LINE = re.compile(r"^\s+([0-9a-f]+):\s+(\S+)\s*(.*)$")


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop: their names and operands."""

    instructions: list[tuple[str, str]]

    def count(self, *names: str) -> int:
        return sum(name in names for name, _ in self.instructions)

    @property
    def loads(self) -> int:
        """Vectors that are loaded."""
        return sum(
            len(re.findall(r"\bq\d+", operands.split("[")[0]))
            for name, operands in self.instructions
            if name in {"ldr", "ldur", "ldp", "ld1"}
        )

    @property
    def uses_stack(self) -> bool:
        return any("sp" in re.findall(r"\w+", operands) for _, operands in self.instructions)


def innermost_loop(file: str, function: str, word: str) -> Loop:
    """Give the shortest loop of the function that has the instruction `word`."""
    text = subprocess.run(
        [OBJDUMP, "-d", "--no-show-raw-insn", str(OBJECTS / file)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (body,) = [
        part for part in text.split("\n\n") if re.search(rf"<\S*{function}\S*>:$", part, re.M)
    ]
    code = [match.groups() for line in body.splitlines() if (match := LINE.match(line))]
    places = {int(address, 16): i for i, (address, _, _) in enumerate(code)}
    loops = []
    for end, (_, name, operands) in enumerate(code):
        target = re.search(r"\b([0-9a-f]+) <", operands)
        begin = places.get(int(target.group(1), 16)) if name.startswith("b.") and target else None
        if begin is not None and begin < end:
            loop = Loop([(name, operands) for _, name, operands in code[begin : end + 1]])
            if loop.count(word):
                loops.append(loop)
    return min(loops, key=lambda loop: len(loop.instructions))


# A tile of 12 rows of a packed left factor and two vectors of columns has 24 sums in registers.
@pytest.mark.parametrize(
    ("file", "function", "word", "least"),
    [
        ("kernels_neon.cpp.o", "multiply_tileIfNS.*Li2ELi12ELi12E", "fmla", 24 / 5),
        ("kernels_neon.cpp.o", "multiply_tileIdNS.*Li2ELi12ELi12E", "fmla", 24 / 8),
        ("kernels_neon_bf16.cpp.o", "multiply_tileILi4ELb1ELi6E", "bfmmla", 24 / 10),
    ],
    ids=["float32", "float64", "bfloat16"],
)
def test_multiplications_for_each_load(file, function, word, least):
    loop = innermost_loop(file, function, word)
    assert loop.count(word) == 24
    assert loop.count(word) / loop.loads >= least
    assert not loop.uses_stack
    assert loop.count("dup", "fmov", "mov", "fmul", "fadd") == 0


# The left factor is read where it stands: a number of each row, copied to all lanes.
@pytest.mark.parametrize(("dtype", "num_loads"), [("f", 14), ("d", 14)])
def test_a_left_factor_in_place(dtype, num_loads):
    loop = innermost_loop("kernels_neon.cpp.o", f"multiply_tileI{dtype}NS.*Li2ELi12ELi0E", "fmla")
    assert loop.count("fmla") == 24
    assert len([name for name, _ in loop.instructions if name.startswith("ld")]) <= num_loads
    assert not loop.uses_stack
