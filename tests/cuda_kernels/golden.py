# Files of what is expected to stay as it is, beside this file; `pytest --accept` writes them anew,
# and the reviewer reads the difference.
from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
_HASH = re.compile(r"_[0-9a-f]{12}(?=\b|_finish\b|_stage\d\b)")


def without_hashes(text: str) -> str:
    """Give a text without the hashes of kernels' names, which a word of the prelude changes."""
    return _HASH.sub("", text)


def compare(name: str, text: str, accept: bool) -> None:
    """Raise AssertionError if a text is not that of the file; with `accept`, write the file."""
    path = FOLDER / name
    if accept:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"no {path}: --accept writes it"
    assert text == path.read_text(), f"{path} differs: --accept writes it anew"
