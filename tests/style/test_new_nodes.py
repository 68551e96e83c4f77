"""New nodes are written by ops::Writer, which names them and tells their types."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
WRITERS = {"ops/writer.cpp", "python/bind_ir.cpp"}  # the second one for tests of the verbs
VERBS = re.compile(r"\bir::(append|insert_before)\(")


def verbs_in(file: str, text: str) -> list[str]:
    """List the verbs of ir/edit.h by which a file makes nodes that it should ask a Writer for."""
    if file.startswith("ir/") or file in WRITERS:
        return []
    return VERBS.findall(text)


@pytest.mark.parametrize("room", sorted(path.name for path in CSRC.iterdir() if path.is_dir()))
def test_new_nodes_are_written_by_the_writer(room):
    found = {}
    for path in sorted((CSRC / room).rglob("*.cpp")):
        file = path.relative_to(CSRC).as_posix()
        if verbs := verbs_in(file, path.read_text()):
            found[file] = verbs
    assert found == {}


def test_another_way_is_found():
    assert verbs_in("passes/one.cpp", "Node& n = ir::insert_before(graph, at, {}, {}, {});") == [
        "insert_before"
    ]
    assert verbs_in("ops/writer.cpp", "ir::append(graph);") == []
