"""Proves `out=` overloads and writes the list that the engine uses.

    python -m tests.out_forms.prove [--device cuda] [--write] [--verbose]

The list is csrc/run/proved_out_forms.cpp: a line for each overload, a column for each device and
version of torch. An overload is proved if all calls that PyTorch's operator database and
hand_written.py make of it, in all layouts, do the same as its functional form. This takes minutes.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.out_forms import hand_written
from tests.out_forms.isolation import Note, in_child
from tests.out_forms.layouts import OTHER_ORDERS, PARTS, as_given, row_major, variants
from tests.out_forms.overloads import pairs
from tests.out_forms.proof import (
    Call,
    NoCall,
    Strides,
    Truth,
    Warnings,
    Wrong,
    prove,
    truth_of,
)  # fmt: skip
from tests.out_forms.samples import DTYPES, watch_operator

TABLE = Path(__file__).parents[2] / "csrc" / "run" / "proved_out_forms.cpp"
# Kernels that gather along a dim: where it is the last one, each row may be written over.
ROW_DIMS = {
    "aten::_softmax.out": 1, "aten::_log_softmax.out": 1,
    "aten::_softmax_backward_data.out": 2, "aten::_log_softmax_backward_data.out": 2,
}  # fmt: skip
LARGEST = 5000  # elements of an argument


@dataclass
class Finding:
    """What the calls of one overload have shown."""

    calls: int = 0  # that its functional form took, each in one layout
    wrong: Counter[str] = field(default_factory=Counter)
    tried: set[str] = field(default_factory=set)  # words
    refuted: dict[str, str] = field(default_factory=dict)  # word: why

    @property
    def is_proved(self) -> bool:
        """Tell whether it was called and never wrong."""
        return self.calls > 0 and not self.wrong

    @property
    def cell(self) -> str:
        """Give what the list says of it."""
        if not self.is_proved:
            return "-"
        return ",".join(sorted(self.tried - self.refuted.keys())) or "yes"


class Fatal(Exception):
    """An attempt is left out because it has ended a process before."""


class Prover:
    """Collects findings. Of each overload and tuple of dtypes it wants `most` calls."""

    def __init__(self, device: str, most: int) -> None:
        self.findings = {pair.name: Finding() for pair in pairs(device).values()}
        self._most = most
        self._seen: dict[tuple, set] = defaultdict(set)
        self._taken: set[tuple] = set()
        self._note = Note()  # of the attempt that is under way
        self._fatal: set[str] = set()

    def wants(self, call: Call) -> bool:
        """Tell whether there is not enough of its kind yet; if so, note that there is one more."""
        tensors = call.tensors()
        if not tensors or any(tensor.numel() > LARGEST for tensor in tensors):
            return False
        seen = self._seen[_dtypes_of(call)]
        kind = _kind_of(call)
        if kind in seen or len(seen) >= self._most:
            return False
        seen.add(kind)
        return True

    def take(self, call: Call) -> None:
        """Prove a call in all layouts; with each argument alone in one if it is the first."""
        is_first = _dtypes_of(call) not in self._taken
        self._taken.add(_dtypes_of(call))
        kind = _kind_of(call)
        with Warnings() as said:
            for name, variant in variants(call, each=is_first):
                self._prove(f"{name} of {kind}", variant, said)

    def run_isolated(self, work: Callable[[], None]) -> None:
        """Do work that hands calls to this prover in a child; again, if an attempt ends it."""
        while True:
            state = in_child(lambda: (work(), self.findings, self._seen, self._taken))
            if state is not None:
                _, self.findings, self._seen, self._taken = state
                return
            self._fatal.add(self._note.read())

    def _prove(self, where: str, call: Call, said: Warnings) -> None:
        name = call.pair.name
        try:
            self._start(f"{name} functional {where}")
            truth = truth_of(call)
        except (NoCall, Fatal):
            return
        finding = self.findings[name]
        finding.calls += 1

        def attempt(word: str, strides: Strides, over: int | None = None) -> str | None:
            try:
                self._start(f"{name} {word} {strides.__name__} {over} {where}")
                prove(call, truth, strides, said, over)
            except (Wrong, Fatal) as wrong:
                return f"{wrong} ({where}, result {strides.__name__}, over {over})"
            return None

        wrong = attempt("right", row_major)
        if wrong is not None:
            finding.wrong[wrong] += 1
            return
        others = [
            ("strides", strides, None)
            for strides in OTHER_ORDERS
            if any(strides(result) != row_major(result) for result in truth.results)
        ]
        if call.pair.is_pointwise:
            others += [("parts", strides, None) for strides in PARTS]
        if word := _word_for_operands(call):
            others += [(word, as_given, over) for over in _operands_like_result(call, truth)]
        for word, strides, over in others:
            finding.tried.add(word)
            wrong = attempt(word, strides, over)
            if wrong is not None:
                finding.refuted.setdefault(word, wrong)

    def _start(self, attempt: str) -> None:
        if attempt[:4000].strip() in self._fatal:
            raise Fatal("ends the process")
        self._note.write(attempt[:4000])


def _dtypes_of(call: Call) -> tuple:
    return call.pair.name, *(tensor.dtype for tensor in call.tensors())


def _kind_of(call: Call) -> tuple:
    """Give what tells calls apart: not the numbers, nor sizes beyond 0, 1 and more."""

    def of(value: object) -> object:
        if isinstance(value, Tensor):
            sizes = tuple(min(size, 2) for size in value.shape)
            return value.dtype, sizes, value.is_contiguous()
        if isinstance(value, (list, tuple)):
            return tuple(of(item) for item in value)
        return repr(value)

    return tuple(of(value) for value in (*call.args, *call.kwargs.items()))


def _word_for_operands(call: Call) -> str | None:
    """Name what writing over an operand would prove; None where the engine never does."""
    if call.pair.is_pointwise:
        return "over"
    if call.pair.name not in ROW_DIMS:
        return None
    dim, rank = call.args[ROW_DIMS[call.pair.name]], call.args[0].dim()
    return "rows" if rank > 0 and dim in (-1, rank - 1) else None


def _operands_like_result(call: Call, truth: Truth) -> list[int]:
    """Number the operands over which the engine may write the only result."""
    if len(truth.results) != 1:
        return []
    result = truth.results[0]

    def is_like(tensor: Tensor) -> bool:
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        same = tensor.dtype == result.dtype and tensor.shape == result.shape
        covers = tensor.is_contiguous() or tensor.stride() == result.stride()
        return is_plain and same and covers and tensor.stride() == result.stride()

    return [number for number, tensor in enumerate(call.tensors()) if is_like(tensor)]


def prove_all(device: str, samples: int = 6, most: int = 3) -> dict[str, Finding]:
    """Prove all overloads of a device with the calls of all operators and those written by hand."""
    from torch.testing._internal.common_methods_invocations import op_db

    prover = Prover(device, most)
    torch.set_num_threads(1)  # those of OpenMP do not survive a fork
    # Nor does CUDA.
    run = prover.run_isolated if device == "cpu" else lambda work: work()
    run(lambda: hand_written.watch(device, DTYPES, prover))
    for operator in op_db:
        run(lambda operator=operator: watch_operator(operator, DTYPES, device, samples, prover))
    return prover.findings


def column_of(device: str) -> str:
    """Name the column of a device for the torch that is installed."""
    return f"{device}-{'.'.join(torch.__version__.split('.')[:2])}"


def read_table() -> dict[str, dict[str, str]]:
    """Read the list: by overload, then by column."""
    lines = re.search(r'R"\(\n(.*)\)"', TABLE.read_text(), re.DOTALL).group(1).splitlines()
    names = lines[0].split()[1:]
    return {line.split()[0]: dict(zip(names, line.split()[1:], strict=True)) for line in lines[1:]}


def write_column(column: str, cells: dict[str, str]) -> None:
    """Put a column into the list; overloads that no column proves are left out."""
    table = defaultdict(dict, read_table())
    names = sorted({name for row in table.values() for name in row} | {column})
    for overload in table.keys() | cells.keys():
        table[overload][column] = cells.get(overload, "-")
    rows = [["overload", *names]]
    for overload, row in sorted(table.items()):
        found = [row.get(name, "-") for name in names]
        if set(found) != {"-"}:
            rows.append([overload, *found])
    widths = [max(len(row[i]) for row in rows) for i in range(len(names) + 1)]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    code = TABLE.read_text()
    TABLE.write_text(re.sub(r'(?s)R"\(\n.*\)"', lambda _: f'R"(\n{text}\n)"', code))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--write", action="store_true", help="write the column of this torch")
    parser.add_argument("--verbose", action="store_true", help="say what was wrong")
    options = parser.parse_args()
    findings = prove_all(options.device)
    kinds = Counter(
        "proved" if f.is_proved else "wrong" if f.wrong else "never called"
        for f in findings.values()
    )
    print(f"{column_of(options.device)}: {len(findings)} overloads,", dict(kinds))
    for name, finding in findings.items() if options.verbose else ():
        if finding.is_proved and not finding.refuted:
            continue
        print(name, finding.cell, f"({finding.calls} calls, {finding.wrong.total()} wrong)")
        for text in [*list(finding.wrong)[:4], *finding.refuted.values()]:
            print(f"    {text}")
    if options.write:
        cells = {name: finding.cell for name, finding in findings.items()}
        write_column(column_of(options.device), cells)


if __name__ == "__main__":
    main()
