"""What differs between versions of torch is asked in one room, and by one function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torch_ort"
ROOM = PACKAGE / "pytorch"
OUTSIDE = sorted(path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents)
EVERYWHERE = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
# Files that name the version of torch, and do not choose by it.
NAMING = {
    "pytorch/versions.py": "it has the functions that others ask",
    "__init__.py": "torch is to be the one of the build",
    "engine/tuning.py": "choices by timing are kept for one version",
    "engine/out_forms.py": "the log says it",
}


def is_version(node: ast.AST) -> bool:
    """Tell whether a node is `torch.__version__`, by any name of torch."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "__version__"
        and isinstance(node.value, ast.Name)
        and node.value.id in ("torch", "_torch")
    )


def names_version(text: str) -> bool:
    return any(map(is_version, ast.walk(ast.parse(text))))


def is_of_torch(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def probes(text: str) -> list[int]:
    """List the lines that look whether torch has a name, or a function of torch's an argument."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if ast.unparse(call.func) in ("hasattr", "inspect.signature")
        and is_of_torch(call.args[0])
        and all(isinstance(arg, ast.Constant) for arg in call.args[1:])
    ]


def orders(text: str) -> list[int]:
    """List the lines that compare versions of torch as texts, by which 2.9 follows 2.13."""
    ordering = ast.Lt | ast.LtE | ast.Gt | ast.GtE
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        and any(isinstance(op, ordering) for op in node.ops)
        and any(map(is_version, ast.walk(node)))
    ]


def test_the_version_is_read_where_the_list_says():
    paths = [path for path in PACKAGE.rglob("*.py") if names_version(path.read_text())]
    assert {str(path.relative_to(PACKAGE)) for path in paths} == {*NAMING}


def test_torch_is_probed_in_its_room():
    found = {str(path.relative_to(ROOT)): probes(path.read_text()) for path in OUTSIDE}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_versions_are_compared_as_numbers():
    found = {str(path.relative_to(ROOT)): orders(path.read_text()) for path in EVERYWHERE}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (names_version, "import torch as _torch\nx = f(_torch.__version__)"),
        (probes, "hasattr(torch.compiler, 'set_stance')"),
        (probes, "'x' in inspect.signature(torch.compile).parameters"),
        (orders, "torch.__version__ < '2.13'"),
        (orders, "'2.9' <= torch.__version__.split('+')[0]"),
    ],
)
def test_one_is_found(find, text):
    assert find(text)


def test_others_are_left_alone():
    assert not probes("hasattr(torch.nn.Module, name)\nhasattr(tensor, 'full_tensor')")
    assert not orders("torch.__version__ == built")
