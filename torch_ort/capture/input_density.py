"""How many tokens of the inputs are not padding, and how many labels their loss does not ignore.

ORTMODULE_PRINT_INPUT_DENSITY=1 prints them in the table of ONNX Runtime Training. A captured graph
tells which inputs these are: those that an embedding with a `padding_idx` looks up, and those that
a cross-entropy has for labels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_ort.capture.logs import rank_and_world
from torch_ort.engine.onnx_files import Source

_aten = torch.ops.aten

ROWS_OF_A_TABLE = 10
_TITLE = ">>>Valid token/label density (e.g. valid/total) in passing {} steps:"
_LINE = "\t| {:<10} | {:<10} | {:<15} | {:<10} | {:<10} | {:<15} | {:<15} | {:<15} |"
_HEADS = (
    "STEP", "INPUT TYPE", "INPUT NAME", "PAD IDX", "DENSITY", "VALID TOKENS", "TOTAL TOKENS",
    "VALID TOKENS/BATCH",
)  # fmt: skip

# Losses that ignore one label: the positions of the labels and of that number among the arguments.
_LOSSES = {_aten.nll_loss_forward.default: (1, 4), _aten.nll_loss2d_forward.default: (1, 4)}
_COPIES = (
    _aten.clone.default, _aten._to_copy.default, _aten.detach.default, _aten.alias.default,
    _aten.lift_fresh_copy.default,
)  # fmt: skip
_RESHAPES = (
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.t.default,
    _aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default, _aten.squeeze.default,
    _aten.squeeze.dim, _aten.squeeze.dims,
)  # fmt: skip
_PARTS = (_aten.slice.Tensor, _aten.select.int, _aten.constant_pad_nd.default)

# One step from an input to what is counted: an operator and its other arguments.
Step = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
_FLATTEN: Step = (torch.flatten, ())


@dataclass(frozen=True)
class Inspected:
    """One input of a graph: a kind of the table, and the number of padding or ignored labels."""

    position: int
    name: str
    kind: str  # EMBED or LABEL
    ignored: int
    steps: tuple[Step, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give what the embedding or the loss reads of the input, but for its shape."""
        for function, others in self.steps:
            tensor = function(tensor, *others)
        return tensor


class InputDensity:
    """Counts the numbers of some inputs in each call of a graph; rank 0 alone does so."""

    def __init__(self, inspected: Sequence[Inspected]) -> None:
        self._inspected = inspected

    def __call__(self, inputs: Sequence[Any]) -> None:
        """Count those of a call; prints a table when there are enough rows."""
        if rank_and_world()[0] != 0:
            return
        for each in self._inspected:
            with torch.no_grad():
                _table.add(each, each.of(inputs[each.position]))


class Table:
    """Rows of all graphs of the process, printed to standard output ten by ten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        self._rows: list[str] = []

    def add(self, inspected: Inspected, numbers: torch.Tensor) -> None:
        """Count the numbers of an input in a new row."""
        is_valid = numbers != inspected.ignored
        by_element = "N/A"
        if inspected.kind == "EMBED" and numbers.dim() > 1:
            by_element = str(is_valid.flatten(1).sum(1).tolist())
        valid, total = int(is_valid.sum()), numbers.numel()
        density = f"{100 * valid / max(total, 1):<9.2f}%"
        with self._lock:
            self._rows.append(
                _LINE.format(
                    self._step, inspected.kind, inspected.name, inspected.ignored, density, valid,
                    total, by_element,
                )
            )  # fmt: skip
            self._step += 1
            if len(self._rows) == ROWS_OF_A_TABLE:
                title = _TITLE.format(ROWS_OF_A_TABLE)
                print("\n".join([title, _LINE.format(*_HEADS), *self._rows, "<<<"]), flush=True)
                self._rows.clear()


_table = Table()


def input_density(
    graph: fx.Graph, placeholders: Sequence[fx.Node], sources: Mapping[str, Source]
) -> InputDensity | None:
    """Find what to inspect in each call of a graph; None if there is nothing.

    `placeholders` are the graph's inputs in the order of a call, and `sources` tell their names.
    """
    positions = {node: i for i, node in enumerate(placeholders)}
    found: dict[Inspected, None] = {}
    for node in graph.nodes:
        numbers, kind, ignored = _read_by(node)
        traced = _trace(numbers, positions) if isinstance(numbers, fx.Node) else None
        if traced is None:
            continue
        source, steps = traced
        name = _short(sources[source.name].name) if source.name in sources else source.name
        found[Inspected(positions[source], name, kind, ignored, steps)] = None
    return InputDensity([*found]) if found else None


def _short(path: str) -> str:
    """Give the name of an argument where a path to it ends in one: `input_ids` of `kwargs`."""
    last = path.rpartition(".")[2]
    return last if last.isidentifier() else path


def _read_by(node: fx.Node) -> tuple[Any, str, int]:
    """Give what an embedding looks up, or a loss has for labels; None for other nodes."""
    if node.target is _aten.embedding.default:
        padding = _argument(node, 2, "padding_idx", -1)
        if isinstance(padding, int) and padding >= 0:
            return node.args[1], "EMBED", padding
    elif node.target in _LOSSES:
        labels, ignored = (node.args[i] for i in _LOSSES[node.target])
        if isinstance(ignored, int):
            return labels, "LABEL", ignored
    return None, "", 0


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _trace(
    node: fx.Node, positions: Mapping[fx.Node, int]
) -> tuple[fx.Node, tuple[Step, ...]] | None:
    """Give the input that a value is made of, and how; None if it is not of an input alone.

    Shapes that change neither how many numbers there are nor which are left out here.
    """
    way = []
    while node not in positions:
        if node.target not in (*_COPIES, *_RESHAPES, *_PARTS):
            return None
        way.append(node)
        node = node.args[0]
    steps: list[Step] = []
    is_reshaped = False
    for each in reversed(way):
        if each.target in _RESHAPES:
            is_flat = len(each.meta["val"].shape) == 1 and not is_reshaped
            is_reshaped = not is_flat
            steps += [_FLATTEN] if is_flat else []
        elif each.target in _PARTS:
            others = tuple(
                tuple(other) if isinstance(other, list | tuple) else other
                for other in each.args[1:]
            )
            if is_reshaped or each.kwargs or not all(_is_constant(other) for other in others):
                return None
            steps.append((each.target, others))
    while steps and steps[-1] is _FLATTEN:
        steps.pop()
    return node, tuple(steps)


def _is_constant(argument: Any) -> bool:
    parts = argument if isinstance(argument, tuple) else (argument,)
    return all(part is None or isinstance(part, int | float) for part in parts)
