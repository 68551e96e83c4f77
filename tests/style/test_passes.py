"""A pass gets all that it depends on as arguments: a graph, and a context (passes/context.h)."""

import re
from pathlib import Path

import pytest

PASSES = Path(__file__).parents[2] / "csrc" / "passes"
FILES = sorted(path for path in PASSES.iterdir() if path.suffix in {".h", ".cpp"})
# Variables that outlive a call: thread_local ones, and static ones that may change.
STATE = re.compile(r"\bthread_local\b|^\s*static (?!const\b|constexpr\b)[^()]*[;={]", re.MULTILINE)
INCLUDE = re.compile(r'^#include "passes/(\w+)\.h"', re.MULTILINE)


def state_in(text: str) -> list[str]:
    return [found.strip() for found in STATE.findall(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_pass_keeps_state_between_calls(path):
    assert state_in(path.read_text()) == []


def test_state_is_found():
    assert state_in("thread_local int left = 0;\n") == ["thread_local"]
    assert state_in("  static std::vector<int> found;\n") == ["static std::vector<int> found;"]
    assert state_in("  static const std::vector<Pass> passes = {\n") == []
    assert state_in("  static bool is_plain(int place);\n") == []


def test_the_interface_of_all_passes_knows_no_single_one():
    includes = {
        name: INCLUDE.findall((PASSES / name).read_text()) for name in ("pass.h", "context.h")
    }
    assert includes == {"pass.h": ["context"], "context.h": []}
