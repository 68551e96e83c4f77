"""PyTorch's operators are named in csrc/ops/ and csrc/convert/; other rooms ask rows for facts."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
MAY_NAME = {"ops", "convert"}
FILES = sorted(
    path
    for path in CSRC.rglob("*")
    if path.suffix in {".h", ".cpp"} and path.relative_to(CSRC).parts[0] not in MAY_NAME
)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
NAME = re.compile(r'"(aten::\w*)')


def names_in(text: str) -> list[str]:
    """List the operators that a text names in string literals, outside comments."""
    return NAME.findall(COMMENT.sub("", text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CSRC)))
def test_no_operator_is_named(path):
    assert names_in(path.read_text()) == []


def test_a_name_is_found():
    assert names_in('if (call.op == "aten::cat") return;') == ["aten::cat"]
    assert names_in('return name.starts_with("aten::");') == ["aten::"]
    assert names_in('const char* op;  // "aten::cat"\n') == []
