"""The table of what could be recomputed by name, which is logged at level INFO."""

from __future__ import annotations

import re

from torch_ort import _C
from torch_ort.engine.program import Program

LEVELS = (
    "USER_SPECIFIED",
    "TRANSFORMER_LAYERWISE_RECOMPUTE",
    "TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE",
)
_COLUMNS = "Freq | Max Saving(Bytes) | Saving Symbolic(Bytes)"
_TO_SWITCH_ON = (
    "set ORTMODULE_MEMORY_OPT_LEVEL to 1 or 2 for whole layers, or ORTMODULE_MEMORY_OPT_CONFIG to "
    "plans of this list, with commas between them"
)
_NAME_OF_DIM = "inputs_{}_dim{}"


def table(program: Program, listed: _C.BudgetReport, level: int) -> str:
    """Write the table for a captured graph.

    `listed` has bytes of the captured call; an expression names a dynamic size after the first
    input that has it. `level` is that of `memory_opt_level`.
    """
    names = _names_of_sizes(program)
    is_on = level > 0 or any(row["is_on"] for row in listed.clusters)
    lines = [f"Memory Optimizer : {'ON' if is_on else 'OFF'} : " + _summary(listed, level, is_on)]
    if listed.clusters:
        lines.append(f"   Plan : Cluster:Type:Count | {_COLUMNS}")
    used: set[str] = set()
    for number, row in enumerate(listed.clusters, 1):
        expression = _named(row["saved_expression"], names, used)
        lines.append(
            f" - Plan {number} : {'ON' if row['is_on'] else 'OFF'} : "
            f"{row['name']}:{row['type']}:{row['count']} | {row['frequency']:,} | "
            f"{row['saved_bytes']:,} | {expression}"
        )
    if listed.clusters:
        lines.append(
            "Saved is what crosses no more from forward to backward, by each plan alone, in the "
            "first call; count -1: all occurrences."
        )
    hints = program.captured.size_hints
    values = [f"{names[symbol]} = {hints[symbol]:,}" for symbol in sorted(used) if symbol in hints]
    if values:
        lines.append(f"Sizes in the first call: {', '.join(values)}.")
    return "\n".join(lines)


def _summary(listed: _C.BudgetReport, level: int, is_on: bool) -> str:
    held, planned = listed.dense_held_bytes, listed.held_bytes
    if not is_on:
        return f"{held:,} bytes are held for backward; {_TO_SWITCH_ON}"
    layers = f", {listed.num_layers} layers" if level else ""
    return f"[{LEVELS[level]}]{layers}: {planned:,} of {held:,} bytes are held for backward"


def _names_of_sizes(program: Program) -> dict[str, str]:
    """Name each symbol after the user's first input that has it as a size."""
    types = program.captured.types()
    found: dict[str, str] = {}
    inputs = program.captured.input_names
    named = [name for name in inputs if name in program.input_names]
    for name in (*named, *(name for name in inputs if name not in program.input_names)):
        for dim, size in enumerate(types[name][1]):
            user_name = re.sub(r"\W+", "_", program.input_names.get(name, name))
            found.setdefault(str(size), _NAME_OF_DIM.format(user_name, dim))
    symbols = program.captured.size_hints
    return {symbol: found.get(symbol, symbol) for symbol in symbols}


def _named(expression: str, names: dict[str, str], used: set[str]) -> str:
    def name_of(match: re.Match[str]) -> str:
        text = match[0]
        if text in names:
            used.add(text)
            return names[text]
        return f"{int(text):,}" if text.isdigit() else text

    return re.sub(r"\w+", name_of, expression)
