"""What pages, the Makefile and the code say of versions of PyTorch is the same."""

from __future__ import annotations

import re
from pathlib import Path

from versions import page

from torch_ort.pytorch.versions import TESTED

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def in_makefile(pattern: str) -> list[str]:
    return re.search(pattern, MAKEFILE, re.MULTILINE)[1].split()


def test_the_readme_has_the_table_of_the_results() -> None:
    readme = page.README.read_text()
    assert page.with_table(readme, page.read_results()) == readme, (
        "python tests/versions/page.py writes the README's table"
    )


def test_the_table_has_all_versions_that_are_tested() -> None:
    usual = in_makefile(r"^TORCH_SPEC \?= torch==(.*)$")
    others = in_makefile(r"^OTHER_TORCHES := (.*)$")
    found = {minor_of(version) for version in page.read_results()}
    assert {minor_of(version) for version in usual + others} == found
    assert set(TESTED) <= found


def test_the_chosen_tests_exist() -> None:
    text = MAKEFILE.replace("\\\n", " ")
    for name in ("REST_OF_TESTS", "TENTH_OF_TESTS"):
        tests = re.search(rf"^{name} := (.*)$", text, re.MULTILINE)[1].split()
        assert tests
        assert [each for each in tests if not (ROOT / "tests" / each).exists()] == []
