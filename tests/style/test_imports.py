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
    "__init__": "public", "_build_info": "core", "_installed": "core", "options": "core",
    "fallback": "engine", "backend": "backend", "configure": "training", "scripted": "training",
    "parallel": "training", "seeding": "training",
}  # fmt: skip
COMPILER = {
    "core": set(),
    "pytorch": {"core"},
    "triton": {"core"},
    "engine": {"core", "pytorch", "triton"},
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
        "core", "pytorch", "engine", "functions", "read", "steps", "capture", "dynamo",
    },
    "optim": {"core", "engine"},
    "debug": {"core", "pytorch", "engine"},
    "reports": {"core", "pytorch", "engine", "functions", "dynamo", "backend"},
}  # fmt: skip
# Roads to the compiler other than torch.compile, which it knows nothing of.
ROADS = {
    "ortmodule": {
        "core", "pytorch", "engine", "guards", "functions", "steps", "capture",
    },
    "onnx": {"core", "pytorch", "ortmodule"},
    "training": {"core", "guards", "ortmodule"},
    "integrations": {"core", "optim", "ortmodule"},
}  # fmt: skip
# The rooms of onnxruntime_training/, which nothing else in the package imports.
OLD = "onnxruntime_training"
OLD_LIBRARY = {
    OLD: set(),
    f"{OLD}.compat": {"core", "functions"},
    f"{OLD}.convergence": {"ortmodule"},
    f"{OLD}.experimental": {"core", "capture", "ortmodule"},
    f"{OLD}.optim": {"optim"},
    f"{OLD}.samplers": set(),
    f"{OLD}.trainers": {"core", "pytorch", "onnx", "optim", "ortmodule", f"{OLD}.optim"},
}
# Where users import what is in onnxruntime_training/; `optim` has a room of the compiler, too.
IMPORT_PATHS = ("compat", "convergence", "experimental", "trainers", "utils")
PATHS_OF_OPTIM = ("optim.__init__", "optim.lr_scheduler")
MAY_IMPORT = COMPILER | ROADS | OLD_LIBRARY
MAY_IMPORT |= {
    "import paths": {"core", "optim", "ortmodule", *OLD_LIBRARY},
    "public": {*COMPILER, *ROADS, "import paths"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """Give a module's name in the package: `capture.graphs`; a package's is `capture.__init__`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """Give the room of a module."""
    first, _, rest = module.partition(".")
    if not rest:
        return LOOSE[first]
    if first in IMPORT_PATHS or module in PATHS_OF_OPTIM:
        return "import paths"
    inner, _, below = rest.partition(".")
    return f"{OLD}.{inner}" if first == OLD and below else first


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


def test_the_compiler_knows_nothing_of_the_other_roads():
    for room, others in COMPILER.items():
        assert not others & set(ROADS), room


def test_nothing_knows_the_folder_of_onnxruntime_training_but_its_import_paths():
    for room, others in (COMPILER | ROADS).items():
        assert not others & {*OLD_LIBRARY, "import paths"}, room
    public = {module for module in MODULES if room_of(module) == "public"}
    importing = {
        module
        for module, path in MODULES.items()
        if any(other.startswith(OLD) for other in imports(path.read_text()))
    }
    for module in importing - public:
        assert room_of(module) in {*OLD_LIBRARY, "import paths"}, module
    assert not importing & public


def only_names(text: str) -> bool:
    """Tell whether a module imports names, lists them in `__all__`, runs its main, and no more."""
    tree = ast.parse(text)
    imported: list[str] = []
    listed: list[str] = []
    for statement in tree.body[1 if ast.get_docstring(tree) else 0 :]:
        match statement:
            case ast.ImportFrom(names=names):
                imported += [name.asname or name.name for name in names]
            case ast.Assign(targets=[ast.Name("__all__")], value=ast.List() as names):
                listed = ast.literal_eval(names)
            case ast.If() if ast.unparse(statement) == MAIN:
                pass
            case _:
                return False
    return sorted(imported) == sorted(listed)


MAIN = "if __name__ == '__main__':\n    raise SystemExit(main())"


@pytest.mark.parametrize("module", [it for it in MODULES if room_of(it) == "import paths"])
def test_an_import_path_has_nothing_but_names(module):
    assert only_names(MODULES[module].read_text())


@pytest.mark.parametrize(
    "text", ["from a import *", "from a import b", "from a import b\n__all__ = ['b']\nb()"]
)
def test_more_than_names_is_found(text):
    assert not only_names(text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("pytorch.patches", "from torch_ort.capture import graphs"),
        ("pytorch.patches", "def f():\n    from torch_ort.capture.graphs import GraphCompiler"),
        ("record.recorder", "import torch_ort.script.replay"),
        ("capture.graphs", "if TYPE_CHECKING:\n    from torch_ort.ortmodule import ORTModule"),
        ("engine.compiler", "from torch_ort import ORTModule"),
        ("ortmodule.module", "from torch_ort.trainers import trainer"),
        ("optim.scaled_step", "from torch_ort.onnxruntime_training.optim import configs"),
        ("onnxruntime_training.samplers.ranks", "from torch_ort.trainers.v0 import ORTTrainer"),
    ],
)
def test_a_wrong_import_is_found(module, text):
    assert directions_broken(module, text)


def test_a_ring_is_found():
    assert ring({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert ring({"a": {"b", "c"}, "b": {"c"}}) == []
