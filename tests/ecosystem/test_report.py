# The page of integrations, as a script writes it from a report of pytest's.
from __future__ import annotations

import sys
from pathlib import Path

from tests.ecosystem import report

XML = """<testsuites><testsuite>
<testcase classname="tests.ecosystem.test_trainer" name="test_losses_are_eagers[bert-fp32]"/>
<testcase classname="tests.ecosystem.test_trainer" name="test_losses_are_eagers[t5-bf16]">
  <skipped message="slow"/></testcase>
<testcase classname="tests.ecosystem.test_peft" name="test_losses_are_eagers">
  <failure message="no"/></testcase>
</testsuite></testsuites>"""


def test_rows_say_what_came_of_each_case(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(XML)
    text = report.page(report.read_report(path))
    assert "| losses are eagers | passed | bert-fp32 |" in text
    assert "| losses are eagers | not run | t5-bf16 |" in text
    assert "| losses are eagers | **failed** |  |" in text
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in text


def test_each_file_of_tests_has_a_title() -> None:
    files = {path.stem for path in report.FOLDER.glob("test_*.py")} - {Path(__file__).stem}
    assert files == {*report.INTEGRATIONS}


def test_packages_that_are_missing_are_named() -> None:
    assert report.versions(("no-such-package",)) == "no-such-package (not installed)"
