"""torch_ort/options.py is the one reader of the environment."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = ROOT / "torch_ort" / "options.py"
PYTHON_FILES = sorted(path for path in (ROOT / "torch_ort").rglob("*.py") if path != OPTIONS)
CPP_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp"})

GETENV = re.compile(r"\b(secure_getenv|getenv|environ|get_env|check_env)\b(?=\s*[(\[;,)])")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
READERS = {"environ", "environb", "getenv", "getenvb"}


def python_reads(text: str) -> list[int]:
    """List the lines that name the environment, by attribute of `os` or by import from it."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for name in node.names if name.name in READERS]
    return lines


def cpp_reads(text: str) -> list[str]:
    """List the calls that read the environment, outside comments and strings."""
    return [match.group(1) for match in GETENV.finditer(COMMENT.sub("", text))]


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_leaves_the_environment_to_options(path):
    assert python_reads(path.read_text()) == []


@pytest.mark.parametrize("path", CPP_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_cpp_does_not_read_the_environment(path):
    assert cpp_reads(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.environ.get('A')",
        "import os as system\nx = system.getenv('A')",
        "from os import environ",
    ],
)
def test_a_read_is_found_in_python(text):
    assert python_reads(text)


def test_a_read_is_found_in_cpp():
    assert cpp_reads('auto* x = std::getenv("A");') == ["getenv"]
    assert cpp_reads('// getenv("A") is not called\nlog("getenv(");') == []
