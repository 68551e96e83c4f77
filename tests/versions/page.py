"""Keeps what trials beside versions of torch have found, and writes the README's table of it.

    python tests/versions/page.py [RECORD...]

A record (trial.py) takes the place of an earlier one of the same torch, but for what follows the
`+`, in results.json beside this file; there, null stands for a version that is to be tried. The
README says what that file says (tests/style).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from packaging.version import Version

README = Path(__file__).resolve().parents[2] / "README.md"
RESULTS = Path(__file__).with_name("results.json")
BEGIN, END = "<!-- written by tests/versions/page.py -->", "<!-- end of what it writes -->"
HEAD = (
    "| PyTorch | Python | tests on the CPU | tests of CUDA, on the test device | steps of models | "
    "`out=` forms |",
    "| --- | --- | --- | --- | --- | --- |",
)

Record = dict[str, Any]
Results = dict[str, Record | None]  # by release


def read_results() -> Results:
    """Read what is kept, by release."""
    return json.loads(RESULTS.read_text())


def release_of(version: str) -> str:
    """Give a version without its local part: `2.13.0` of `2.13.0+cu130`."""
    return version.partition("+")[0]


def with_record(results: Results, record: Record) -> Results:
    """Add a record, the releases in their order."""
    added = {**results, release_of(record["torch"]): record}
    return dict(sorted(added.items(), key=lambda item: Version(item[0])))


def table(results: Results) -> str:
    """Write the table as Markdown."""
    return "\n".join([*HEAD, *(_row(*each) for each in results.items())])


def _row(release: str, record: Record | None) -> str:
    if record is None:
        return f"| {release} | | not yet | not yet | not yet | |"
    minor_of_python = ".".join(record["python"].split(".")[:2])
    left = record["left_to_eager"]
    cells = (
        record["torch"], minor_of_python, _count(record["cpu"]), _count(record["cuda_tests"]),
        f"{record['models']}, {f'{left} calls left to eager PyTorch' if left else 'all whole'}",
        str(record["out_forms"] or "none"),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _count(tests: dict[str, Any] | None) -> str:
    if tests is None:
        return "not yet"
    failed = len(tests["failed"])
    return f"{tests['passed']} passed" + (f", {failed} failed" if failed else "")


def with_table(page: str, results: Results) -> str:
    """Put the table into a page, between its two marks.

    Raises ValueError if the page has no place for it.
    """
    place = re.compile(rf"{re.escape(BEGIN)}\n(.*?\n)?{re.escape(END)}", re.DOTALL)
    if not place.search(page):
        raise ValueError(f"README.md: no place for the table: want {BEGIN} and {END}")
    return place.sub(lambda _: f"{BEGIN}\n{table(results)}\n{END}", page, count=1)


def main(paths: list[str]) -> None:
    """Take records, and write the file and the page."""
    results = read_results()
    for path in paths:
        results = with_record(results, json.loads(Path(path).read_text()))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    README.write_text(with_table(README.read_text(), results))


if __name__ == "__main__":
    main(sys.argv[1:])
