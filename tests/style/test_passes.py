"""A pass gets all that it depends on as arguments, and says all that is asked of it in its row."""

import ast
import re
from pathlib import Path

import pytest

from torch_ort import _C

ROOT = Path(__file__).parents[2]
PASSES = ROOT / "csrc" / "passes"
PACKAGE = ROOT / "torch_ort"
FILES = sorted(path for path in PASSES.rglob("*") if path.suffix in {".h", ".cpp"})
# Variables that outlive a call: thread_local ones, and static ones that may change.
STATE = re.compile(r"\bthread_local\b|^\s*static (?!const\b|constexpr\b)[^()]*[;={]", re.MULTILINE)
INCLUDE = re.compile(r'^#include "passes/(\w+)\.h"', re.MULTILINE)


def state_in(text: str) -> list[str]:
    return [found.strip() for found in STATE.findall(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PASSES).as_posix())
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


# Names that something else has as well: an option, and a memory format of torch.
SHARED_NAMES = {("options.py", "lazy_logits"), ("read/fx_reader.py", "channels_last")}
MODULES = sorted(PACKAGE.rglob("*.py"))


def names_in(text: str) -> set[str]:
    """List the passes that a module names in strings, but for those that it runs by name."""
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    run = {arg for call in calls if "run_pass" in ast.dump(call.func) for arg in call.args}
    constants = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in run
    }
    return constants & {*_C.pass_names()}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_python_asks_rows_and_names_no_pass(path):
    module = path.relative_to(PACKAGE).as_posix()
    assert {(module, name) for name in names_in(path.read_text())} <= SHARED_NAMES


def test_a_name_is_found():
    assert names_in('if "fuse_regions" in names: pass') == {"fuse_regions"}
    assert names_in('_C.run_pass("remove_dead", graph)') == set()
