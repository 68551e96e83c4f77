"""Links in Markdown files lead somewhere: to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "tests", "torch_ort")
FILES = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in ROOT.glob(f"{name}/**/*.md"))]
)
CODE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*([^()\s]+)\s*\)|(?:src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
EXTERNAL = re.compile(r"[a-z]+:")


def links_in(text: str) -> list[str]:
    """List where links and pictures lead, outside of code."""
    prose = SPAN.sub("", CODE.sub("", text))
    return [link or attribute for link, attribute in LINK.findall(prose)]


def anchors_in(text: str) -> set[str]:
    """Give the anchors of all headings, as GitHub makes them."""
    anchors: dict[str, int] = {}
    for heading in HEADING.findall(CODE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors[plain] = anchors.get(plain, -1) + 1
    return {
        f"{anchor}-{number}" if number else anchor
        for anchor, last in anchors.items()
        for number in range(last + 1)
    }


def dead_links(path: Path) -> list[str]:
    """List the links of a file that lead nowhere; those to other sites are not followed."""
    dead = []
    for link in links_in(path.read_text()):
        if EXTERNAL.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors_in(target.read_text())):
            dead.append(link)
    return dead


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path) == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "benchmarks/results/decisions.md"])
def test_paths_in_recipes_and_decisions_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = re.findall(r"`((?:csrc|torch_ort|tests|docs|benchmarks|\.ci)/[\w./]+)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_paths_in_the_map_of_the_rooms_exist() -> None:
    text = (ROOT / "csrc" / "README.md").read_text()
    paths = re.findall(r"`([a-z_]+/[\w./]+)`", text)
    assert paths
    roots = (ROOT, ROOT / "csrc")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


def test_messages_in_the_table_of_reasons_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "getting_started.md").read_text()
    quoted = re.findall(r'^\| "([^"]+)"', page, re.MULTILINE)
    code = "".join(path.read_text() for path in (ROOT / "torch_ort").rglob("*.py"))
    assert len(quoted) >= 4
    assert [words for words in quoted if words not in code] == []


def test_make_test_reads_the_same_everywhere() -> None:
    help_text = re.search(r"echo 'make test +(.+)'$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    readme = re.search(r"^make test +# (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert help_text is not None
    assert readme is not None
    assert help_text[1].removeprefix("run ") == readme[1].removeprefix("runs ")


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A `b`, and (c)\n## Twice\n## Twice\n")
    page.write_text(
        "[1](other.md) [2](other.md#a-b-and-c) [3](other.md#twice-1) [4](https://example.org/x)\n"
        "[5](no.md) [6](other.md#no) [7](#none)\n"
        '`[8](in-code.md)` <img src="no.svg">\n'
        "```\n[9](in-code.md)\n```\n[10](\n  wrapped.md)\n"
    )
    assert dead_links(page) == ["no.md", "other.md#no", "#none", "no.svg", "wrapped.md"]
