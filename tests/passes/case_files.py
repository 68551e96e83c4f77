"""Reads the .onnxtxt files beside this file; test_cases.py says what stands in them."""

from __future__ import annotations

import dataclasses
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent
TITLE = re.compile(r"^# -----(.*)\n", re.MULTILINE)
AFTER = "# AFTER\n"


@dataclasses.dataclass
class Case:
    path: pathlib.Path
    pass_name: str
    title: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path.stem}: {self.title}"


def read_cases(path: pathlib.Path) -> tuple[str, list[Case]]:
    """Split a file into its head and its cases."""
    head, *parts = TITLE.split(path.read_text())
    pass_name = re.search(r"^# PASS: (\w+)$", head, re.MULTILINE).group(1)
    cases = []
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        before, separator, after = body.partition(AFTER)
        assert separator, f"{path.name}: case{title} has no `# AFTER` line"
        cases.append(Case(path, pass_name, title.strip(), before.strip(), after.strip()))
    return head, cases


def all_cases() -> list[Case]:
    return [case for path in sorted(FOLDER.glob("**/*.onnxtxt")) for case in read_cases(path)[1]]
