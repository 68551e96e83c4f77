"""cmake/progress.py: what it shows of a build, and where the rest goes."""

from pathlib import Path

import pytest
from own_process import run_python

PROGRAM = Path(__file__).parents[2] / "cmake" / "progress.py"


def run(tmp_path: Path, output: str, *options: str, status: int = 0) -> list[str]:
    """Let it run a command with this output; gives the lines that it shows."""
    text = tmp_path / "output.txt"
    text.write_text(output)
    command = ["sh", "-c", f"cat {text}; exit {status}"]
    result = run_python(PROGRAM, *options, *command)
    assert result.returncode == status
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_a_line_for_each_twentieth(tmp_path):
    ninja = [
        "  [0/2] Re-checking globbed directories...\n",
        "  [1/2] Re-running CMake...\n",
        *(f"  [{i}/100] Building CXX object _C.dir/csrc/ir/f{i}.cpp.o\n" for i in range(1, 100)),
        "  [100/100] Linking CXX shared module _C.so\n",
    ]
    lines = run(tmp_path, "".join(ninja))
    assert lines[:3] == [
        "[1/2] Re-running CMake...",
        "[1/100] csrc/ir/f1.cpp",
        "[5/100] csrc/ir/f5.cpp",
    ]
    assert lines[-1] == "[100/100] Linking CXX shared module _C.so"
    assert len(lines) == 22


def test_nothing_to_do_shows_nothing(tmp_path):
    assert run(tmp_path, "ninja: Entering directory `build'\nninja: no work to do.\n") == []


@pytest.mark.parametrize("status", [0, 1])
def test_other_output_is_passed_on(tmp_path, status):
    lines = run(tmp_path, "[1/1] Building CXX object a.cpp.o\na.cpp:1: warning\n", status=status)
    assert lines == ["[1/1] a.cpp", "a.cpp:1: warning"]


def test_with_a_log_other_output_is_shown_if_the_command_fails(tmp_path):
    log = tmp_path / "build.log"
    output = "[1/2] Building CXX object a.cpp.o\na.cpp:1: error\n"
    assert run(tmp_path, output, "--log", str(log)) == ["[1/2] a.cpp"]
    assert log.read_text() == "a.cpp:1: error\n"
    lines = run(tmp_path, output, "--log", str(log), status=3)
    assert lines == ["[1/2] a.cpp", "a.cpp:1: error"]
