"""docs/counters.md names every counter, and no other."""

import re
from pathlib import Path

import torch_ort

PAGE = Path(__file__).parents[2] / "docs" / "counters.md"


def test_the_page_names_all_counters_and_no_others() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(torch_ort.counters())
