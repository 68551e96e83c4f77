"""Private names of torch stand in one room: torch_ort/pytorch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "torch_ort" / "pytorch"
FILES = sorted(path for path in (ROOT / "torch_ort").rglob("*.py") if COMPAT not in path.parents)
# Private attributes of torch's objects, which stand behind no name of a module.
ATTRIBUTES = {"_schema", "_version"}


def dotted(node: ast.AST) -> list[str]:
    """Give `torch.utils._pytree` as its parts; nothing for what does not start with a name."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return [*start, node.attr] if start else []
    return [node.id] if isinstance(node, ast.Name) else []


def is_private(parts: list[str]) -> bool:
    """Tell whether a path leads into torch by a private name. Operators may have such names."""
    if parts[:1] != ["torch"] or parts[:2] == ["torch", "ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_names(text: str) -> list[str]:
    """List torch's private names in the text of a module."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            parts = dotted(node)
            if is_private(parts) or node.attr in ATTRIBUTES:
                found.append(".".join(parts) or node.attr)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            found += [a.name for a in node.names if is_private([*module, a.name])]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if is_private(a.name.split("."))]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_stand_in_their_room(path):
    assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo.utils",
        "from torch._guards import detect_fake_mode",
        "from torch import _dynamo",
        "import torch\ntorch.utils._pytree.tree_map(f, x)",
        "x = tensor._version",
        "x = node.target._schema.name",
    ],
)
def test_a_private_name_is_found(text):
    assert private_names(text)


def test_names_that_are_not_torchs_are_left_alone():
    for text in (
        "from torch_ort import _C",
        "torch.ops.aten._local_scalar_dense.default",
        "self._names = torch.__file__",
    ):
        assert private_names(text) == []
