"""One file replaces attributes of torch's objects: pytorch/patching.py, for the rows of a table."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHING = ROOT / "torch_ort" / "pytorch" / "patching.py"
FILES = sorted(path for path in (ROOT / "torch_ort").rglob("*.py") if path != PATCHING)
SETTERS = {"setattr", "delattr"}
# Methods of torch's settings, and of its lists of names, that change them.
CHANGING = {"patch", "add", "addFilter"}


def root_of(node: ast.AST) -> str:
    """Give the name that a chain of attributes and items starts from; empty if nothing does."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def names_of_torch(tree: ast.AST) -> set[str]:
    """Give the names in a module that stand for torch, its modules, or what these hold."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if is_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module or ""):
            names |= {a.asname or a.name for a in node.names}
    found = -1
    while found != len(names):  # names of names
        found = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.For) and root_of(value_of(node)) in names:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def value_of(node: ast.Assign | ast.For) -> ast.AST:
    return node.value if isinstance(node, ast.Assign) else node.iter


def is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch" or module == "torch_ort.pytorch.private"


def changes(text: str) -> list[int]:
    """List the lines of a module that assign to objects of torch's, or change its settings."""
    tree = ast.parse(text)
    names = names_of_torch(tree)
    return [node.lineno for node in ast.walk(tree) if changed_by(node) & names]


def changed_by(node: ast.AST) -> set[str]:
    """Give the names from which the chains start that a node writes to."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return set() if isinstance(node.ctx, ast.Load) else {root_of(node)}
    if isinstance(node, ast.Call) and node.args and root_of(node.func) in SETTERS:
        return {root_of(node.args[0])}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return {root_of(node.func)} if node.func.attr in CHANGING else set()
    return set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_else_assigns_to_objects_of_torchs(path):
    assert changes(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.compile = f",
        "import torch\ntorch.compile, x = f, 1",
        "import torch\ndel torch.nn.Module.__getattribute__",
        "import torch\nbase = torch.nn.Module\nbase.__getattribute__ = f",
        "import torch\nfor kind in torch.kinds:\n    kind.__call__ = f",
        "import torch\nsetattr(torch.nn, 'Linear', f)",
        "from torch.fx.experimental import symbolic_shapes as s\ndelattr(s, 'sym_sum')",
        "from torch.fx.experimental import _config\nwith _config.patch(a=True): pass",
        "from torch._dynamo import trace_rules\ntrace_rules.add('x')",
        "from torch_ort.pytorch.private import trace_rules\ntrace_rules.add('x')",
        "import torch\ntorch.ops.aten.dropout.default.py_kernels[1] = f",
    ],
)
def test_an_assignment_is_found(text):
    assert changes(text)


def test_what_is_not_torchs_is_left_alone():
    for text in (
        "import torch\nx = torch.zeros(2)\nx.grad = None",
        "import torch\nself.base = torch.nn.Module",
        "import torch\nnames = set()\nnames.add(torch.nn)",
        "import torch_ort\ntorch_ort.x = 1",
    ):
        assert changes(text) == []
