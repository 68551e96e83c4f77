"""The directions between the rooms of torch_ort/, read from the imports, and that there is no ring.

Imports inside of functions count, and those for type checkers alone.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torch_ort"

# Each room with those it may import from besides itself. What users import by name lies loose.
LOOSE = {
    "__init__": "public",
    "_build_info": "core",
    "_installed": "core",
    "options": "core",
    "fallback": "engine",
    "backend": "backend",
    "configure": "training",
    "scripted": "training",
    "seeding": "training",
}
COMPILER = {
    "core": set(),
    "pytorch": {"core"},
    "engine": {"core", "pytorch"},
    "rules": {"core", "pytorch"},
    "guards": {"core", "pytorch"},
    "functions": {"core", "pytorch", "rules", "guards"},
    "record": {"core", "pytorch", "rules", "guards", "functions"},
    "script": {"core", "pytorch", "rules", "guards", "record"},
    "read": {"core", "pytorch", "engine", "rules", "functions", "record"},
    "steps": {"core", "pytorch", "engine", "rules", "functions", "record", "read"},
    "capture": {
        "core", "pytorch", "engine", "rules", "guards", "functions", "record", "script", "read",
        "steps",
    },
    "dynamo": {
        "core", "pytorch", "engine", "rules", "guards", "record", "read", "steps", "capture",
    },
    "backend": {
        "core", "pytorch", "engine", "read", "steps", "capture", "dynamo",
    },
    "optim": {"core", "engine"},
    "debug": {"core", "pytorch", "engine"},
    "reports": {"core", "pytorch", "engine", "functions", "dynamo", "backend"},
}  # fmt: skip
# For users of ONNX Runtime Training; the compiler knows none of it.
TRAINING = {
    "ortmodule": {
        "core", "pytorch", "engine", "guards", "functions", "steps", "capture",
    },
    "convergence": {"ortmodule"},
    "experimental": {"core", "capture", "ortmodule"},
    "trainers": {"core", "pytorch", "optim", "ortmodule"},
    "utils": set(),
    "compat": {"core", "functions"},
    "training": {"core", "guards", "ortmodule"},
    "integrations": {"core", "optim", "ortmodule"},
}  # fmt: skip
MAY_IMPORT = COMPILER | TRAINING | {"public": {*COMPILER, *TRAINING}}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """Give a module's name in the package: `capture.joint`; a package's is `capture.__init__`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """Give the room of a module."""
    first, _, rest = module.partition(".")
    return first if rest else LOOSE[first]


def imports(text: str) -> set[str]:
    """Give the modules of the package that a module's text imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are written from torch_ort"
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        found |= {known for name in names if (known := known_module(name))}
    return found


def known_module(name: str) -> str:
    """Give the module that a dotted name is, or lies in; empty for what is not the package's."""
    parts = name.split(".")
    if parts[0] != "torch_ort":
        return ""
    for end in range(len(parts), 0, -1):
        inner = ".".join(parts[1:end])
        for candidate in (inner, f"{inner}.__init__" if inner else "__init__"):
            if candidate in MODULES:
                return candidate
        if inner == "_C":
            return ""
    return ""


def directions_broken(module: str, text: str) -> list[str]:
    """List the imports of a module that its room may not have."""
    room = room_of(module)
    return [
        f"{room} may not import {other}"
        for other in sorted(imports(text))
        if room_of(other) not in MAY_IMPORT[room] | {room}
    ]


def ring(graph: dict[str, set[str]]) -> list[str]:
    """Give the names along a way that comes back to its start; nothing where there is none."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := search(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])


def test_rooms_are_the_known_ones():
    assert {room_of(module) for module in MODULES} == set(MAY_IMPORT)
    assert {module for module in MODULES if "." not in module} == set(LOOSE)


@pytest.mark.parametrize("module", MODULES)
def test_imports_keep_the_directions(module):
    assert directions_broken(module, MODULES[module].read_text()) == []


def test_rooms_form_no_ring():
    assert ring(MAY_IMPORT) == []


def test_modules_form_no_ring():
    found = {module: imports(path.read_text()) - {module} for module, path in MODULES.items()}
    assert ring(found) == []


def test_the_compiler_knows_nothing_of_onnx_runtime_training():
    for room, others in COMPILER.items():
        assert not others & set(TRAINING), room


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("pytorch.patches", "from torch_ort.capture import joint"),
        ("pytorch.patches", "def f():\n    from torch_ort.capture.joint import Capture"),
        ("record.recorder", "import torch_ort.script.replay"),
        ("capture.joint", "if TYPE_CHECKING:\n    from torch_ort.ortmodule import ORTModule"),
        ("engine.compiler", "from torch_ort import ORTModule"),
    ],
)
def test_a_wrong_import_is_found(module, text):
    assert directions_broken(module, text)


def test_a_ring_is_found():
    assert ring({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert ring({"a": {"b", "c"}, "b": {"c"}}) == []
