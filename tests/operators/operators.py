"""PyTorch's own operator database, through the engine's roads against eager PyTorch.

    python tests/operators/operators.py --results FILE [NAME ...]

runs all operators, or those named; what FILE has a line for is not run again.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from operator_cases import LAYOUTS, Case, cases
from operator_exceptions import is_run, row_for
from operator_runs import check, run_eager

DTYPES = (
    torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool,
)  # fmt: skip


def database() -> list[Any]:
    """Give PyTorch's operators, each by the name that its OpInfo has."""
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


@dataclass(frozen=True)
class Extent:
    """How much is tried of each operator; Dynamo runs for the first sample of the first dtype."""

    dtypes: Sequence[torch.dtype] = DTYPES
    layouts: Sequence[str] = LAYOUTS
    max_samples: int = 12
    roads: Sequence[str] = ("ortmodule", "graph", "compile")


@dataclass
class Tally:
    """What came of an operator."""

    counts: Counter[str] = field(default_factory=Counter)  # calls by road
    failures: list[str] = field(default_factory=list)


def check_operator(operator: Any, extent: Extent) -> Tally:
    """Run an operator's samples by eager PyTorch and by each road."""
    tally = Tally()
    for case in _cases(operator, extent):
        try:
            want = run_eager(case)
        except Exception:  # no call of this kind, in this dtype or layout
            tally.counts["refused by eager"] += 1
            continue
        for road in extent.roads:
            if road == "compile" and not _is_first(case, extent):
                continue
            tally.counts[road] += 1
            row = row_for(case, road)
            tally.counts["excepted"] += row is not None
            try:
                check(road, case, want, row)
            except Exception as error:
                words = " ".join(str(error).split())[:300]
                tally.failures.append(f"{road}: {case}: {type(error).__name__}: {words}")
    return tally


def _cases(operator: Any, extent: Extent) -> Iterator[Case]:
    for dtype in extent.dtypes:
        if operator.supports_dtype(dtype, "cpu"):
            torch.manual_seed(0)
            made = cases(operator, dtype, extent.layouts, extent.max_samples)
            yield from filter(is_run, list(made))  # drawn before runs seed anew


def _is_first(case: Case, extent: Extent) -> bool:
    return case.dtype == extent.dtypes[0] and case.sample == 0 and case.layout == "as given"


def check_operators(operators: Sequence[Any], extent: Extent) -> Iterator[tuple[str, Tally]]:
    """Run operators one after the other; gives names and what came of them."""
    # PyTorch's samples of random operators set a seed in each call, which eager alone would obey.
    seeding = "torch.testing._internal.common_methods_invocations.wrapper_set_seed"
    with (
        warnings.catch_warnings(),
        mock.patch(seeding, lambda target, *args, **kwargs: target(*args, **kwargs)),
    ):
        warnings.simplefilter("ignore")
        for operator in operators:
            yield operator.formatted_name, check_operator(operator, extent)


def main() -> None:
    """Run operators; write one line for each, and say at the end what came of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="operators; all if none is named")
    parser.add_argument("--results", type=Path, default=Path("operators.jsonl"))
    parser.add_argument("--dtypes", nargs="*", help="names of dtypes")
    parser.add_argument("--samples", type=int, default=Extent.max_samples)
    chosen = parser.parse_args()
    dtypes = [getattr(torch, name) for name in chosen.dtypes] if chosen.dtypes else DTYPES
    extent = Extent(dtypes=dtypes, max_samples=chosen.samples)
    done = _read(chosen.results)
    operators = [
        operator
        for operator in database()
        if operator.formatted_name not in done
        and (not chosen.names or operator.formatted_name in chosen.names)
    ]
    with chosen.results.open("a", encoding="utf-8") as file:
        for name, tally in check_operators(operators, extent):
            line = {"name": name, "counts": tally.counts, "failures": tally.failures}
            file.write(json.dumps(line) + "\n")
            file.flush()
            for failure in tally.failures:
                print(failure, flush=True)
    lines = _read(chosen.results).values()
    total = sum((Counter(line["counts"]) for line in lines), Counter())
    failures = sum(len(line["failures"]) for line in lines)
    print(f"{len(lines)} operators, {dict(total)}, {failures} failures")


def _read(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line for line in lines}


if __name__ == "__main__":
    main()
