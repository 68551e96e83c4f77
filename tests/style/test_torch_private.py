"""Private names of torch stand in one room, torch_ort/pytorch, and there in one table."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "torch_ort" / "pytorch"
FILES = sorted(path for path in (ROOT / "torch_ort").rglob("*.py") if COMPAT not in path.parents)
ROOM = sorted(path for path in COMPAT.glob("*.py") if path.name != "private.py")
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
    if parts[:3] == ["torch_ort", "pytorch", "private"]:
        return True
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
        "from torch_ort.pytorch.private import FakeTensor",
        "from torch_ort.pytorch import private",
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


def table() -> list[tuple[str, str]]:
    """Give the table of private.py: pairs of a module of torch and a name in it."""
    (found,) = (
        node.value
        for node in ast.parse((COMPAT / "private.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAMES"
    )
    rows = ast.literal_eval(found).items()
    return [(module, name) for module, names in rows for name in names.split()]


def is_listed(path: str, names: list[str]) -> bool:
    """Tell whether a path is a name, leads to one, or starts from one."""
    return any(f"{name}.".startswith(f"{path}.") or path.startswith(f"{name}.") for name in names)


def unlisted(text: str) -> list[str]:
    """List what a module of the room uses of torch's insides that the table does not have."""
    nodes = [*ast.walk(ast.parse(text))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    paths = [dotted(node) for node in nodes if isinstance(node, ast.Attribute)]
    names = {"private": ""}  # of the table, by those that the module has for them
    for node in imports:
        if node.module == "torch_ort.pytorch.private":
            names |= {alias.asname or alias.name: f"{alias.name}." for alias in node.names}
    torchs = [f"{module}.{name}" for module, name in table()]
    ours = [name for _, name in table()]
    of_torch = [".".join(parts) for parts in paths if is_private(parts)]
    imported = [names[p[0]] + ".".join(p[1:]) for p in paths if p and p[0] in names]
    return [
        *(n.module for n in imports for a in n.names if is_private([*n.module.split("."), a.name])
          if not n.module.startswith("torch_ort")),
        *(path for path in of_torch if not is_listed(path, torchs)),
        *(path for path in imported if not is_listed(path, ours)),
        *(name for name in names.values() if name and not is_listed(name[:-1], ours)),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ROOM, ids=lambda path: path.name)
def test_private_names_stand_in_the_table(path):
    assert unlisted(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch._guards import detect_fake_mode",
        "torch._C._no_such_name(x)",
        "torch._C._autograd._no_such_name(x)",
        "from torch_ort.pytorch.private import no_such_name",
        "from torch_ort.pytorch.private import exc as e\ne.NoSuchName",
        "from torch_ort.pytorch import private\nprivate._no_such_name",
    ],
)
def test_a_name_that_the_table_lacks_is_found(text):
    assert unlisted(text)


def test_names_that_are_imported_stand_for_one_thing():
    modules: dict[str, set[str]] = {}
    for module, name in table():
        modules.setdefault(name.partition(".")[0], set()).add(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
