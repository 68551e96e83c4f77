"""Writes the body of a region (csrc/cuda/body.h) as kernels of Triton.

A program computes a tile of rows. It goes over the columns of a row once for each pass: a pass ends
where sums or extremes along the row become known. Sums over rows are made of lines, one for each
program, which a second kernel adds. All values have two dims, rows and columns, of which either may
be 1. Sizes and strides are numbers of the text, so that each set of sizes has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Elements of a tile on a GPU, and columns of a tile at most.
TILE, _MOST_COLUMNS = 4096, 4096
# The lines and columns that the second kernel adds at a time.
_LINES, _WIDTH = 32, 128

_WORDS: Mapping[str, Callable[..., str]] = {
    "Copy": lambda x: x,
    # Triton subtracts from 0, which would lose the sign of a zero.
    "Neg": lambda x: f"{x} * -1.0",
    "Abs": lambda x: f"tl.abs({x})",
    "Exp": lambda x: f"tl.exp({x})",
    "Log": lambda x: f"tl.log({x})",
    "Log1p": lambda x: f"log1p({x})",
    "Sqrt": lambda x: f"root({x})",
    "Reciprocal": lambda x: f"reciprocal({x})",
    "Tanh": lambda x: f"tanh({x})",
    "Erf": lambda x: f"tl.erf({x})",
    "Sigmoid": lambda x: f"sigmoid({x})",
    "Relu": lambda x: f"tl.where({x} < 0, 0.0, {x})",
    "Floor": lambda x: f"tl.floor({x})",
    "Ceil": lambda x: f"tl.ceil({x})",
    "Round": lambda x: f"nearest({x})",
    "Trunc": lambda x: f"whole({x})",
    "Sign": lambda x: f"(({x} > 0).to(WIDE) - ({x} < 0).to(WIDE))",
    "Sin": lambda x: f"tl.sin({x})",
    "Cos": lambda x: f"tl.cos({x})",
    "Not": lambda x: f"({x} == 0).to(WIDE)",
    "IsNan": lambda x: f"({x} != {x}).to(WIDE)",
    "ToBool": lambda x: f"({x} != 0).to(WIDE)",
    "ToBFloat16": lambda x: f"rounded_to_bfloat16({x})",
    "ToHalf": lambda x: f"rounded_to_half({x})",
    "Gelu": lambda x: f"{x} * normal_cdf({x})",
    "GeluTanh": lambda x: f"0.5 * {x} * (1.0 + tanh(gelu_tanh_inner({x})))",
    "Silu": lambda x: f"silu({x})",
    "HardSwish": lambda x: f"{x} * smaller(larger({x} + 3.0, 0.0), 6.0) * (1.0 / 6.0)",
    "Add": lambda x, y: f"{x} + {y}",
    "Sub": lambda x, y: f"{x} - {y}",
    "Mul": lambda x, y: f"{x} * {y}",
    "Div": lambda x, y: f"quotient({x}, {y})",
    "Pow": lambda x, y: f"power({x}, {y})",
    "Max": lambda x, y: f"larger({x}, {y})",
    "Min": lambda x, y: f"smaller({x}, {y})",
    "LeakyRelu": lambda x, slope: f"{x} * tl.where({x} > 0, 1.0, {slope})",
    "Equal": lambda x, y: f"({x} == {y}).to(WIDE)",
    "Less": lambda x, y: f"({x} < {y}).to(WIDE)",
    "LessOrEqual": lambda x, y: f"({x} <= {y}).to(WIDE)",
    "Greater": lambda x, y: f"({x} > {y}).to(WIDE)",
    "GreaterOrEqual": lambda x, y: f"({x} >= {y}).to(WIDE)",
    "And": lambda x, y: f"(({x} != 0) & ({y} != 0)).to(WIDE)",
    "Or": lambda x, y: f"(({x} != 0) | ({y} != 0)).to(WIDE)",
    "Xor": lambda x, y: f"(({x} != 0) != ({y} != 0)).to(WIDE)",
    "GeluGrad": lambda g, x: f"gelu_grad({g}, {x})",
    "GeluTanhGrad": lambda g, x: f"gelu_tanh_grad({g}, {x})",
    "SiluGrad": lambda g, x: f"silu_grad({g}, {x})",
    "HardSwishGrad": lambda g, x: f"hard_swish_grad({g}, {x})",
    "TanhGrad": lambda g, y: f"{g} * (1.0 - {y} * {y})",
    "SigmoidGrad": lambda g, y: f"{g} * (1.0 - {y}) * {y}",
    "ThresholdGrad": lambda g, x, least: f"tl.where({x} <= {least}, 0.0, {g})",
    "LeakyReluGrad": lambda g, x, slope: f"{g} * tl.where({x} > 0, 1.0, {slope})",
    "Where": lambda c, x, y: f"tl.where({c} != 0, {x}, {y})",
    "MulAdd": lambda x, y, z: f"{x} * {y} + {z}",
}
WORDS = frozenset(_WORDS)
# Powers that are products, roots and quotients.
_POWERS: Mapping[float, Callable[[str], str]] = {
    0.5: lambda x: f"root({x})",
    1.0: lambda x: x,
    2.0: lambda x: f"{x} * {x}",
    3.0: lambda x: f"{x} * {x} * {x}",
    -1.0: _WORDS["Reciprocal"],
    -2.0: lambda x: f"reciprocal({x} * {x})",
}

_HEAD = """\
import triton
import triton.language as tl

from torch_ort.triton.words import *

WIDE = tl.constexpr({wide})
"""


@dataclass(frozen=True)
class Sums:
    """Lines of sums that the second kernel adds, and where it writes them."""

    output: int
    lines: int
    columns: int


@dataclass(frozen=True)
class Text:
    """The source of a module with a kernel `region` and, for sums over rows, kernels `sums<i>`.

    `region` takes inputs, outputs, lines of sums and the word for errors, in `programs` programs;
    `sums<i>` takes lines and an output, in `sum_programs[i]` programs.
    """

    source: str
    programs: int
    sums: tuple[Sums, ...]
    sum_programs: tuple[int, ...]
    is_double: bool


def power_of_two(number: int) -> int:
    """Give the least one that is not less."""
    return 1 << max(0, number - 1).bit_length()


def _offset(index: str, axes: Sequence[tuple[int, int]]) -> str:
    """Give the offset of an element along axes of sizes and strides, from the outermost one on."""
    terms, inner = [], 1
    for number, (size, stride) in reversed(list(enumerate(axes))):
        at = index if inner == 1 else f"{index} // {inner}"
        if number > 0:
            at = f"{at} % {size}"
        if size != 1 and stride != 0:
            terms.append(f"({at}) * {stride}")
        inner *= size
    return " + ".join(terms) or f"{index} * 0"


class Printer:
    """Writes one region, with so many elements to a tile."""

    def __init__(self, body: Mapping[str, Any], tile: int = TILE) -> None:
        self._body = body
        self._values = body["values"]
        self._lines: list[str] = []
        self._depth = 1
        self._made: set[int] = set()  # values of rows and of the whole region that stand
        self._labels: set[str] = set()
        columns = body["columns"]
        self._width = min(power_of_two(columns), _MOST_COLUMNS)
        of_group = body["rows"] // max(body["groups"], 1)
        self._height = max(1, min(tile // self._width, power_of_two(of_group)))
        self._of_group = of_group
        self._tiles = max(1, math.ceil(of_group / self._height))

    def write(self) -> Text:
        """Write the module."""
        body = self._body
        programs = self._tiles * body["groups"]
        sums = tuple(
            Sums(each["to"]["result"], self._tiles, 1 if each["is_total"] else body["columns"])
            for each in body["sums"]
        )
        names = [f"in{i}" for i in range(len(body["inputs"]))]
        names += [f"out{i}" for i in range(len(body["output_names"]))]
        names += [f"lines{i}" for i in range(len(sums))]
        self._depth = 0
        self._out(_HEAD.format(wide=self._wide()))
        self._out("@triton.jit")
        self._out(f"def region({', '.join([*names, 'faults'])}):")
        self._depth = 1
        self._write_places()
        for number in range(len(body["needed"])):
            self._write_pass(number)
        self._write_known(len(body["needed"]))
        self._write_rows()
        for i, each in enumerate(body["sums"]):
            self._write_sums(i, each, sums[i])
        return Text(
            "\n".join(self._lines) + "\n", programs, sums,
            tuple(body["groups"] * math.ceil(each.columns / _WIDTH) for each in sums),
            body["is_double"],
        )  # fmt: skip

    # ---- text

    def _out(self, line: str) -> None:
        self._lines.append(line if not line else "    " * self._depth + line)

    def _wide(self) -> str:
        return "tl.float64" if self._body["is_double"] else "tl.float32"

    def _made_of(self, value: int) -> str:
        origin = self._values[value]["origin"]
        return f"  # {origin}" if origin else ""

    # ---- places

    def _write_places(self) -> None:
        """Write the rows of the program, all with two dims."""
        self._out("program = tl.program_id(0).to(tl.int64)")
        self._out(f"group = program // {self._tiles}")
        self._out(f"of_group = program % {self._tiles} * {self._height} "
                  f"+ tl.arange(0, {self._height})[:, None]")  # fmt: skip
        self._out(f"is_row = of_group < {self._of_group}")
        self._out(f"row = group * {self._of_group} + of_group")
        for i, each in enumerate(self._body["sums"]):
            if each["is_total"]:
                self._out(f"total{i} = tl.zeros((1, 1), WIDE)")

    def _write_pass(self, number: int) -> None:
        self._write_known(number)
        reduced = [
            i for i, value in enumerate(self._values)
            if value["kind"] == "reduced" and value["known_in"] == number + 1
        ]  # fmt: skip
        for i in reduced:
            start = {"max": "-float('inf')", "min": "float('inf')"}.get(
                self._values[i]["reduction"], "0.0"
            )
            self._out(f"v{i} = tl.full(({self._height}, 1), {start}, WIDE)")
            self._made.add(i)
        needed = self._body["needed"][number]
        is_last = number == len(self._body["needed"]) - 1
        if needed or reduced or (is_last and self._has_full_results()):
            self._write_columns(needed, reduced, is_last)
        for i in reduced:
            self._write_reduced(i)

    def _has_full_results(self) -> bool:
        stores = any(each["is_full"] for each in self._body["stores"])
        return stores or any(not each["is_of_rows"] for each in self._body["sums"])

    def _write_columns(self, needed: Sequence[int], reduced: Sequence[int], is_last: bool) -> None:
        columns = self._body["columns"]
        self._out(f"for first in range(0, {columns}, {self._width}):")
        self._depth += 1
        self._out(f"column = first + tl.arange(0, {self._width})[None, :].to(tl.int64)")
        self._out(f"is_column = column < {columns}")
        self._out("is_there = is_row & is_column")
        for i in needed:
            self._out(f"v{i} = {self._full(i)}{self._made_of(i)}")
        for i in reduced:
            self._reduce(i)
        if is_last:
            for i, store in enumerate(self._body["stores"]):
                if store["is_full"]:
                    self._store(i, store)
            for i, each in enumerate(self._body["sums"]):
                if not each["is_of_rows"]:
                    self._sum_rows(i, each)
        self._depth -= 1

    # ---- values

    def _write_known(self, number: int) -> None:
        """Write numbers of rows, and of the whole region, that are known when a pass begins."""
        for i, value in enumerate(self._values):
            is_of_columns = value["space"] in ("full", "column")
            if is_of_columns or i in self._made or value["known_in"] > number:
                continue
            self._out(f"v{i} = {self._of_row(i)}{self._made_of(i)}")
            self._made.add(i)
        for value in self._values:
            if value["kind"] == "scatter" or value["reduction"] == "pick":
                self._write_label(value)
        for i, value in enumerate(self._values):
            if value["kind"] == "gather" and number == value["known_in"]:
                self._write_id(i, value)

    def _of_row(self, i: int) -> str:
        value = self._values[i]
        if value["kind"] == "constant" or value["kind"] == "ratio":
            return self._number(value["number"])
        if value["kind"] == "columns":
            return f"tl.full((1, 1), {self._body['columns']}, WIDE)"
        if value["kind"] == "random":
            return self._random(value, "row")
        if value["kind"] == "pointwise":
            return self._pointwise(value)
        access, is_row = self._body["inputs"][value["input"]], value["space"] == "row"
        offset = _offset("row", access["rows"]) if is_row else "tl.zeros((1, 1), tl.int64)"
        mask = ", is_row, 0" if is_row else ""
        return self._loaded(f"tl.load(in{value['input']} + {offset}{mask})", access["dtype"])

    def _full(self, i: int) -> str:
        value = self._values[i]
        if value["kind"] == "random":
            return self._random(value, f"(row * {self._body['columns']} + column)")
        if value["kind"] == "pointwise":
            return self._pointwise(value)
        if value["kind"] == "scatter":
            label, number = self._label(value), f"v{value['operands'][1]}"
            made = f"tl.where(column == {label}, {number}, 0.0)"
            return f"tl.where({label} == -2, float('nan'), {made})"
        access, name = self._body["inputs"][value["input"]], f"in{value['input']}"
        columns = _offset("column", access["columns"])
        if value["kind"] == "gather":
            rows = _offset(f"id{i}", access["rows"])
            mask = f"is_there & (id{i} >= 0)"
            loaded = self._loaded(f"tl.load({name} + {rows} + {columns}, {mask}, 0)",
                                  access["dtype"])  # fmt: skip
            return f"tl.where(id{i} < 0, float('nan'), {loaded})"
        if value["space"] == "column":
            return self._loaded(f"tl.load({name} + {columns}, is_column, 0)", access["dtype"])
        rows = _offset("row", access["rows"])
        return self._loaded(f"tl.load({name} + {rows} + {columns}, is_there, 0)", access["dtype"])

    @staticmethod
    def _loaded(load: str, dtype: str) -> str:
        if dtype == "bool":
            return f"({load} != 0).to(WIDE)"
        return f"of_bfloat16({load}).to(WIDE)" if dtype == "bfloat16" else f"{load}.to(WIDE)"

    @staticmethod
    def _number(number: float) -> str:
        if number == 0 and math.copysign(1, number) < 0:  # Triton makes any zero the same one
            return "tl.full((1, 1), 0.0, WIDE) * -1.0"
        text = repr(number) if math.isfinite(number) else f"float('{number}')"
        return f"tl.full((1, 1), {text}, WIDE)"

    def _pointwise(self, value: Mapping[str, Any]) -> str:
        operands = [f"v{i}" for i in value["operands"]]
        if value["op"] == "Pow":
            exponent = self._values[value["operands"][1]]
            if exponent["kind"] == "constant" and exponent["number"] in _POWERS:
                return _POWERS[exponent["number"]](operands[0])
        return _WORDS[value["op"]](*operands)

    def _random(self, value: Mapping[str, Any], element: str) -> str:
        limit = min(int(value["keep"] * 2**32), 2**32 - 1)
        drawn = f"drawn(tl.load(in{value['input']}), {value['stream']}, {element}, {limit})"
        return f"{drawn}.to(WIDE)"

    # ---- labels and ids

    def _label_value(self, value: Mapping[str, Any]) -> int:
        return value["operands"][0 if value["kind"] == "scatter" else 1]

    def _label(self, value: Mapping[str, Any]) -> str:
        ignored = value["ignored"]
        but = "" if ignored is None else f"_but_{ignored}".replace("-", "minus_")
        return f"label{self._label_value(value)}{but}"

    def _write_label(self, value: Mapping[str, Any]) -> None:
        """Write the column of a label; -1 if it is ignored, and -2 if there is no such column."""
        of, name = self._label_value(value), self._label(value)
        if of not in self._made or name in self._labels:
            return
        self._labels.add(name)
        columns = self._body["columns"]
        self._out(f"{name} = tl.where((v{of} > -1) & (v{of} < {columns}), v{of}, -2).to(tl.int64)")
        if value["ignored"] is not None:
            self._out(f"{name} = tl.where(v{of} == {value['ignored']}, -1, {name})")
        self._out(f"tl.store(faults + {name} * 0, 1, is_row & ({name} == -2))")

    def _write_id(self, i: int, value: Mapping[str, Any]) -> None:
        """Write the row of a table; -2 if there is no such row."""
        ids, table = (self._body["inputs"][value[name]] for name in ("ids", "input"))
        rows = math.prod(size for size, _ in table["rows"])
        offset = _offset("row", ids["rows"])
        self._out(f"id{i} = tl.load(in{value['ids']} + {offset}, is_row, 0).to(tl.int64)")
        self._out(f"id{i} = tl.where((id{i} >= 0) & (id{i} < {rows}), id{i}, -2)")
        self._out(f"tl.store(faults + id{i} * 0, 2, is_row & (id{i} == -2))")

    # ---- reductions along rows

    def _reduce(self, i: int) -> None:
        value = self._values[i]
        of, reduction = f"v{value['operands'][0]}", value["reduction"]
        if reduction == "max":
            found = f"largest(tl.where(is_there, {of}, -float('inf')))"
            self._out(f"v{i} = larger(v{i}, {found})")
        elif reduction == "min":
            found = f"smallest(tl.where(is_there, {of}, float('inf')))"
            self._out(f"v{i} = smaller(v{i}, {found})")
        else:
            where = "is_there"
            if reduction == "pick":
                where = f"is_there & (column == {self._label(value)})"
            self._out(f"v{i} += tl.sum(tl.where({where}, {of}, 0.0), 1, keep_dims=True)")

    def _write_reduced(self, i: int) -> None:
        value = self._values[i]
        if value["reduction"] == "pick":
            self._out(f"v{i} = tl.where({self._label(value)} == -2, float('nan'), v{i})")

    # ---- results

    @staticmethod
    def _narrow(number: str, dtype: str) -> str:
        if dtype == "bool":
            return f"({number} != 0).to(tl.uint8)"
        return f"bfloat16_bits({number})" if dtype == "bfloat16" else f"{number}.to(tl.{dtype})"

    def _store(self, i: int, store: Mapping[str, Any]) -> None:
        to, value = store["to"], f"v{store['value']}"
        offset = f"out{to['result']} + {to['begin']} + {_offset('row', to['rows'])}"
        mask, shape = "is_row", f"({self._height}, 1)"
        if store["is_full"]:
            offset += f" + {_offset('column', to['columns'])}"
            mask, shape = "is_there", f"({self._height}, {self._width})"
        number = f"tl.broadcast_to({self._narrow(value, to['dtype'])}, {shape})"
        self._out(f"tl.store({offset}, {number}, {mask})")

    def _write_rows(self) -> None:
        for i, store in enumerate(self._body["stores"]):
            if not store["is_full"]:
                self._store(i, store)
        for i, each in enumerate(self._body["sums"]):
            if each["is_of_rows"]:
                self._out(f"total{i} = tl.sum(tl.where(is_row, v{each['value']}, 0.0), 0, "
                          "keep_dims=True)")  # fmt: skip
            if each["is_total"]:
                self._out(f"tl.store(lines{i} + program + tl.zeros((1, 1), tl.int64), total{i})")

    # ---- sums over rows

    def _sum_rows(self, i: int, each: Mapping[str, Any]) -> None:
        of_tile = f"tl.sum(tl.where(is_there, v{each['value']}, 0.0), 0, keep_dims=True)"
        if each["is_total"]:
            self._out(f"total{i} += tl.sum({of_tile}, 1, keep_dims=True)")
            return
        columns = self._body["columns"]
        self._out(f"tl.store(lines{i} + program * {columns} + column, {of_tile}, is_column)")

    def _write_sums(self, i: int, each: Mapping[str, Any], sums: Sums) -> None:
        """Write the kernel that adds lines, some columns of a group in each program."""
        to, columns = each["to"], sums.columns
        strips = math.ceil(columns / _WIDTH)
        self._depth = 0
        self._out("")
        self._out("@triton.jit")
        self._out(f"def sums{i}(lines, out):")
        self._depth = 1
        self._out("program = tl.program_id(0).to(tl.int64)")
        self._out(f"group = program // {strips} + tl.zeros((1, 1), tl.int64)")
        self._out(f"column = program % {strips} * {_WIDTH} + tl.arange(0, {_WIDTH})[None, :]")
        self._out(f"is_column = column < {columns}")
        self._out(f"total = tl.zeros((1, {_WIDTH}), WIDE)")
        self._out(f"for first in range(0, {sums.lines}, {_LINES}):")
        self._depth = 2
        self._out(f"line = first + tl.arange(0, {_LINES})[:, None].to(tl.int64)")
        self._out(f"mask = (line < {sums.lines}) & is_column")
        self._out(f"at = lines + (group * {sums.lines} + line) * {columns} + column")
        self._out("total += tl.sum(tl.load(at, mask, 0.0), 0, keep_dims=True)")
        self._depth = 1
        offset = f"out + {to['begin']} + {_offset('group', to['rows'])}"
        offset += f" + {_offset('column', to['columns'])}"
        self._out(f"tl.store({offset}, {self._narrow('total', to['dtype'])}, is_column)")
