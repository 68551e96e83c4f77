"""Every option: one table. The only reader of the environment.

`torch.compile(..., options={...})` wins over the environment, which wins over the default.
`python -m torch_ort.options` prints the table, which is `docs/options.md`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any

from torch_ort._C import UserError

NEWEST_OPSET = 28
OLDEST_OPSET = 12
DUMP_KINDS = ("ir", "passes", "plan", "steps")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Row:
    """One option. `parse` reads text, `check` takes any value; both raise ValueError."""

    name: str
    variable: str
    default: Any
    kind: str
    doc: str
    parse: Callable[[str], Any]
    check: Callable[[Any], Any]


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "on", "yes"):
        return True
    if text.lower() in ("", "0", "false", "off", "no"):
        return False
    raise ValueError("want 0 or 1")


def _check_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("want a bool")


def _check_int(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise ValueError(f"want an integer from {low} to {high}")

    return check


def _check_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("want a string")


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_names(allowed: Callable[[], tuple[str, ...]]) -> Callable[[Any], tuple[str, ...]]:
    def check(value: Any) -> tuple[str, ...]:
        names = _parse_names(value) if isinstance(value, str) else tuple(value)
        for name in names:
            if name not in allowed():
                near = difflib.get_close_matches(name, allowed(), 3, 0.4) or allowed()
                raise ValueError(f"want one of {', '.join(near)}; '{name}' is not known")
        return names

    return check


def _pass_names() -> tuple[str, ...]:
    from torch_ort import _C
    from torch_ort.compiler import PLAN_SWITCHES

    return (*_C.pass_names(), *PLAN_SWITCHES)


def _check_isa(value: Any) -> str:
    from torch_ort import _C

    names = _C.isa_names()
    if value not in ("", *names):
        raise ValueError(f"want one of {', '.join(names)}, or nothing")
    return value


def _row(name, variable, default, kind, doc, parse, check) -> Row:
    return Row(name, variable, default, kind, doc, parse, check)


TABLE: tuple[Row, ...] = (
    _row("strict", "TORCH_ORT_STRICT", False, "bool",
         "Raise instead of falling back to eager PyTorch.", _parse_bool, _check_bool),
    _row("exact_random", "TORCH_ORT_EXACT_RANDOM", False, "bool",
         "Dropout draws eager's own random stream. False: on the CPU its masks are computed inside "
         "fused regions, from one draw per step; `torch.manual_seed` rules both.",
         _parse_bool, _check_bool),
    _row("emulate_eager_casts", "TORCH_ORT_EMULATE_EAGER_CASTS", False, "bool",
         "Round every bfloat16 and float16 value inside fused regions as eager does. False: "
         "regions compute in float32 and round what leaves them, which is closer to the exact "
         "numbers.",
         _parse_bool, _check_bool),
    _row("save_onnx", "ORTMODULE_SAVE_ONNX", False, "bool",
         "Write each graph as `<onnx_prefix>_<number>_{captured,optimized}.onnx`.",
         _parse_bool, _check_bool),
    _row("onnx_prefix", "ORTMODULE_SAVE_ONNX_PREFIX", "torch_ort", "path",
         "Start of the file names of `save_onnx`; its folder must exist.", str, _check_str),
    _row("opset", "ORTMODULE_ONNX_OPSET_VERSION", NEWEST_OPSET, "int",
         "Newest standard opset whose ops may be used; the stamped one is the lowest that fits.",
         int, _check_int(OLDEST_OPSET, NEWEST_OPSET)),
    _row("dump", "TORCH_ORT_DUMP", (), "names",
         f"What to write into `dump_dir`: {', '.join(DUMP_KINDS)}.",
         _parse_names, _check_names(lambda: DUMP_KINDS)),
    _row("dump_dir", "TORCH_ORT_DUMP_DIR", "torch_ort_dump", "path",
         "Folder of the dumps; made when the first file is written.", str, _check_str),
    _row("disable", "TORCH_ORT_DISABLE", (), "names",
         "Passes to leave out by name; also, of the memory plan, `reorder`, `in_place` and "
         "`deliver_gradients`.",
         _parse_names, _check_names(_pass_names)),
    _row("isa", "TORCH_ORT_ISA", "", "name",
         "Instruction set of fused regions: portable, avx2 or avx512; empty: the widest that the "
         "processor runs.", str, _check_isa),
    _row("bisect", "TORCH_ORT_BISECT", -1, "int",
         "Only the first n rewrites happen; -1: all.", int, _check_int(-1, 2**31 - 1)),
    _row("check", "TORCH_ORT_CHECK", 0, "int",
         "0: none; 1: verify graphs at the ends and every plan; 2: after each pass too.",
         int, _check_int(0, 2)),
)  # fmt: skip

_BY_NAME = {row.name: row for row in TABLE}

Options = make_dataclass(
    "Options", [(row.name, Any, row.default) for row in TABLE], frozen=True,
    namespace={"__doc__": "One value for each row of TABLE."},
)  # fmt: skip


def resolve(given: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
    """Give the options in force.

    Raises UserError on an unknown option or mode (naming near matches), and on a value of the
    wrong kind.
    """
    if mode is not None and mode not in MODES:
        raise UserError(f"mode: got {mode!r}, want one of {', '.join(MODES)}{_near(mode, MODES)}")
    values = {}
    for row in TABLE:
        text = os.environ.get(row.variable)
        if text is not None:
            values[row.name] = _checked(row, row.variable, text, row.parse)
    for name, value in (given or {}).items():
        if name not in _BY_NAME:
            names = sorted(_BY_NAME)
            raise UserError(
                f"options: unknown option: got {name!r}, want one of {', '.join(names)}"
                f"{_near(name, names)}"
            )
        values[name] = _checked(_BY_NAME[name], name, value)
    return Options(**values)


def _checked(row: Row, where: str, value: Any, parse: Callable[[str], Any] | None = None) -> Any:
    try:
        return row.check(parse(value) if parse else value)
    except (ValueError, TypeError) as error:
        raise UserError(f"options: {where}: got {value!r}, {error}") from None


def _near(name: str, names: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(str(name), names, 2, 0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def page() -> str:
    """Give the table as a page of Markdown."""
    return "\n".join([_HEAD, *map(_line, TABLE)])


_HEAD = """\
# Options

One table, printed by `python -m torch_ort.options`. `options={...}` of `torch.compile` wins over
the environment, which wins over the default. In the environment a bool is `0` or `1`, and names
stand with commas between them. Unknown options and values of the wrong kind are errors.

| option | variable | default | kind | meaning |
| --- | --- | --- | --- | --- |"""


def _line(row: Row) -> str:
    default = "none" if row.default == () else f"`{row.default}`"
    return f"| `{row.name}` | `{row.variable}` | {default} | {row.kind} | {row.doc} |"


if __name__ == "__main__":
    print(page())
