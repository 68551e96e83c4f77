"""Training programs of all kinds, ten steps each, against eager PyTorch on both roads.

`table.txt` says of each program and road how many graphs were captured, and what ran in eager
PyTorch: zeros, or a reason. README.md of this folder tells how to add a program.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from field import table
from field.program import PROGRAMS, assert_same, run
from roads import ROADS

import torch_ort

pytestmark = pytest.mark.ort_only

NO_PROGRAMS = ("program", "table", "test_field")
for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in NO_PROGRAMS:
        importlib.import_module(f"field.{path.stem}")

# Programs that are known to fail, by name and road, with the defect that shows in them.
DEFECTS: dict[table.Key, str] = {}


def cases() -> Iterator:
    for name, one in PROGRAMS.items():
        for road in ROADS:
            marks = [] if one.is_quick else [pytest.mark.slow]
            if (name, road) in DEFECTS:
                reason = DEFECTS[name, road]
                marks.append(pytest.mark.xfail(reason=reason, strict=True))
            yield pytest.param(name, road, marks=marks, id=f"{name}-{road}")


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager PyTorch take over: the table says where it does."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")


@pytest.mark.hands_over("the table has a column of them")
@pytest.mark.parametrize(("name", "road"), cases())
def test_a_program_trains_as_in_eager_pytorch(name, road, lenient, caplog, request):
    one = PROGRAMS[name]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        want = run(one, lambda module: module)
        torch_ort.reset_counters()
        got = run(one, ROADS[road])
    counters = torch_ort.counters()
    assert_same(got, want, one)
    assert counters["recorder_bugs"] == 0
    assert counters["forward_runs"] or counters["calls_left_to_eager"], "eager without a word"
    ours = [record for record in caplog.records if record.name.startswith(("torch_ort", "ort"))]
    assert [record.getMessage() for record in ours if record.levelno >= logging.ERROR] == []
    texts = [str(warning.message) for warning in warned]
    assert [text for text in texts if "bug of torch_ort" in text or "Traceback" in text] == []
    row = table.row_of(counters)
    if request.config.getoption("--accept"):
        table.accept((name, road), row)
        print(f"{name} on {road}: {row.counts}", *texts, sep="\n")  # shown by -s, or -rP
        return
    expected = table.read_table()[name, road]
    assert row.counts == expected.counts, "\n".join(texts)


def test_the_table_has_a_row_of_each_program_and_no_other():
    assert sorted(table.read_table()) == sorted((name, road) for name in PROGRAMS for road in ROADS)


def test_each_row_that_is_not_zero_has_a_reason():
    rows = table.read_table()
    assert [key for key, row in rows.items() if row.needs_reason and not row.reason] == []


def test_a_tenth_of_the_programs_is_in_the_default_run():
    quick = [one for one in PROGRAMS.values() if one.is_quick]
    assert len(PROGRAMS) >= 60
    assert len(quick) * 10 >= len(PROGRAMS)
