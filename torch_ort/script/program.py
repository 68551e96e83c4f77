"""The code of a TorchScript function, as `_C.ScriptFunction` gives it, in named parts."""

from __future__ import annotations

from typing import Any, NamedTuple


class Step(NamedTuple):
    """A node of a TorchScript graph."""

    kind: str
    overload: str
    is_operator: bool
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[tuple, ...]
    extra: Any
    file: str
    line: int
    text: str

    def where(self) -> str:
        """Give the user's line in words."""
        place = f"{self.file}:{self.line}" if self.file else "an unknown line"
        line = (self.text.strip() or "?").splitlines()[0]
        return f"{place}: {line}"


class Block(NamedTuple):
    """Steps in order, over numbered values."""

    inputs: tuple[int, ...]
    steps: list[Step]
    outputs: tuple[int, ...]


def read_block(parts: tuple) -> Block:
    """Read what `_C.ScriptFunction.program` gives."""
    inputs, steps, outputs = parts
    read = [
        Step(*step[:6], tuple(read_block(inner) for inner in step[6]), *step[7:]) for step in steps
    ]
    # Some nodes have no line. They get that of the node before or after.
    for ordered in (range(1, len(read)), range(len(read) - 2, -1, -1)):
        for i in ordered:
            near = read[i - ordered.step]
            if not read[i].file and near.file:
                read[i] = read[i]._replace(file=near.file, line=near.line, text=near.text)
    return Block(inputs, read, outputs)
