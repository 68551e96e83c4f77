"""The description of a model as a dict, and checks of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_ort.onnxruntime_training.trainers.descriptions import IODescription


class ModelDescription:
    """A checked `{"inputs": [(name, shape), ...], "outputs": [(name, shape, is_loss), ...]}`.

    `inputs` and `outputs` are lists of `IODescription`, `loss` is the name of the output that is
    the loss. Shapes are lists of numbers and of names for sizes that vary. `is_loss` may be left
    out where it is False, and holds for one output alone.

    Raises ValueError, which lists all that is wrong.
    """

    def __init__(self, model_desc: Mapping[str, Any]) -> None:
        if not isinstance(model_desc, Mapping):
            raise ValueError(f"model_desc: got {type(model_desc).__name__}, want a dict")
        problems = [
            f"{key}: unknown, want inputs and outputs"
            for key in model_desc
            if key not in ("inputs", "outputs")
        ]
        problems += _problems("inputs", model_desc.get("inputs"), (2,))
        problems += _problems("outputs", model_desc.get("outputs"), (2, 3))
        if problems:
            raise ValueError(f"model_desc: {'; '.join(problems)}")
        self.inputs = [IODescription(name, shape) for name, shape in model_desc["inputs"]]
        self.outputs = [IODescription(it[0], it[1]) for it in model_desc["outputs"]]
        losses = [it[0] for it in model_desc["outputs"] if len(it) == 3 and it[2]]
        if len(losses) != 1:
            raise ValueError(
                f"model_desc: outputs: got {len(losses)} losses, want one, as (name, [], True)"
            )
        self.loss = losses[0]


def _problems(what: str, rows: Any, lengths: tuple[int, ...]) -> list[str]:
    if not isinstance(rows, list | tuple) or not rows:
        return [f"{what}: got {rows!r}, want a list of (name, shape)"]
    found = [
        f"{what}[{i}]: {words}" for i, row in enumerate(rows) if (words := _problem(row, lengths))
    ]
    names = [row[0] for row in rows if isinstance(row, list | tuple) and row]
    found += [
        f"{what}: the name {name!r} comes twice"
        for i, name in enumerate(names)
        if name in names[:i]
    ]
    return found


def _problem(row: Any, lengths: tuple[int, ...]) -> str:
    if not isinstance(row, list | tuple) or len(row) not in lengths:
        wanted = "(name, shape)" if len(lengths) == 1 else "(name, shape) or (name, shape, is_loss)"
        return f"got {row!r}, want {wanted}"
    if not isinstance(row[0], str) or not row[0]:
        return f"name: got {row[0]!r}, want a string"
    if not isinstance(row[1], list | tuple) or not all(isinstance(it, int | str) for it in row[1]):
        return f"shape of {row[0]}: got {row[1]!r}, want a list of numbers and names"
    if len(row) == 3 and not isinstance(row[2], bool):
        return f"is_loss of {row[0]}: got {row[2]!r}, want a bool"
    return ""
