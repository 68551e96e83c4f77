"""The README's table of versions of PyTorch: written from records, and equal to what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from versions import page

ROOT = Path(__file__).parents[2]


def record(torch: str, **changed) -> dict:
    return {
        "torch": torch, "cuda": "", "python": "3.11.7", "out_forms": 283,
        "cpu": {"passed": 900, "failed": []}, "cuda_tests": {"passed": 300, "failed": []},
        "models": 20, "left_to_eager": 0, **changed,
    }  # fmt: skip


def test_a_row_says_what_was_found() -> None:
    rows = page.table(page.with_record({}, record("2.12.1+cu130"))).splitlines()
    assert rows[2:] == ["| 2.12.1+cu130 | 3.11 | 900 passed | 300 passed | 20, all whole | 283 |"]


def test_a_row_hides_nothing() -> None:
    worse = record(
        "2.15.0", out_forms=0, left_to_eager=3,
        cpu={"passed": 899, "failed": ["a"]}, cuda_tests={"passed": 298, "failed": ["b", "c"]},
    )  # fmt: skip
    assert page.table({"2.15.0": worse}).splitlines()[2] == (
        "| 2.15.0 | 3.11 | 899 passed, 1 failed | 298 passed, 2 failed | "
        "20, 3 calls left to eager PyTorch | none |"
    )


def test_tests_that_were_left_out_are_to_be_run() -> None:
    (row,) = page.table({"2.15.0": record("2.15.0", cuda_tests=None)}).splitlines()[2:]
    assert row == "| 2.15.0 | 3.11 | 900 passed | not yet | 20, all whole | 283 |"


def test_a_version_that_is_to_be_tried_has_a_row() -> None:
    assert page.table({"2.15.0": None}).splitlines()[2] == (
        "| 2.15.0 | | not yet | not yet | not yet | |"
    )


def test_releases_are_in_order_and_have_one_row_each() -> None:
    results = {}
    for version in ("2.13.0+cu130", "2.9.1", "2.13.0+cpu", "2.14.0rc2", "2.14.0", "2.12.1"):
        results = page.with_record(results, record(version))
    assert [*results] == ["2.9.1", "2.12.1", "2.13.0", "2.14.0rc2", "2.14.0"]
    assert results["2.13.0"]["torch"] == "2.13.0+cpu"


def test_a_record_is_taken_into_file_and_page(tmp_path, monkeypatch) -> None:
    results, readme, taken = (tmp_path / name for name in ("r.json", "README.md", "record.json"))
    results.write_text("{}")
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    taken.write_text(json.dumps(record("2.12.1")))
    monkeypatch.setattr(page, "RESULTS", results)
    monkeypatch.setattr(page, "README", readme)
    page.main([str(taken)])
    table = page.table({"2.12.1": record("2.12.1")})
    assert readme.read_text() == f"before\n{page.BEGIN}\n{table}\n{page.END}\nafter\n"
    assert page.read_results() == {"2.12.1": record("2.12.1")}


def test_a_page_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="no place for the table: want <!-- written by"):
        page.with_table("a page", {})
