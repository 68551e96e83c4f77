"""The picture of README.md and its figures are made from a result; README.md says what it says."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from own_process import run_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "front_page.py"
MARKS = "<!-- written by benchmarks/front_page.py -->", "<!-- end of what it writes -->"


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python(SCRIPT, *arguments)


def row(model: str, backend: str, step_s: float, first_s: float, peak: int) -> dict[str, Any]:
    counters = {"ort": {"fallbacks": 0}}
    return {
        "model": model,
        "backend": backend,
        "threads": 2,
        "steps": [[2 * step_s, step_s], [step_s]],
        "fwd_bwd": [[step_s, step_s], [step_s]],
        "foreign_cpu": [0.0, 0.02],
        "first_cold": [{"first_step_s": first_s, "counters": counters}],
        "memory": [{"step_peak_bytes": peak, "counters": counters}],
        "steady_counters": [counters],
        "error": None,
        "refused": None,
        "figures": {"of": "no use here"},
    }


@pytest.fixture
def document() -> dict[str, Any]:
    """Return a result of two models, in which ort takes a half and an eighth of eager's time."""
    machine = {"torch": "2.13.0+cpu", "cores": 2, "cpu": "AVX512", "device": "cpu"}
    return {
        "settings": {"arguments": ["--threads", "2"], "machine": machine},
        "records": [
            row("one", "eager", 0.4, 0.1, 1000),
            row("one", "inductor", 0.2, 10.0, 800),
            row("one", "ort", 0.2, 0.5, 600),
            row("two", "eager", 0.8, 0.4, 1000),
            row("two", "inductor", 0.4, 40.0, 1200),
            row("two", "ort", 0.1, 2.0, 600),
            # A run with one thread as well is not what the page shows.
            row("one", "ort", 9.0, 9.0, 9) | {"threads": 1},
        ],
    }


@pytest.fixture
def result(tmp_path: Path, document: dict[str, Any]) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text("before\n{}\nold figures\n{}\nafter\n".format(*MARKS))
    return path


def test_figures_and_pictures(tmp_path: Path, result: Path, readme: Path) -> None:
    pictures = tmp_path / "pictures"
    done = run_script(result, "--readme", readme, "--pictures", pictures)
    assert done.returncode == 0, done.stderr
    page = readme.read_text()
    words = " ".join(page.split())
    assert page.startswith(
        f"before\n{MARKS[0]}\n- **Step**: 0.25 of the time in eager PyTorch, 0.50"
    )
    assert "holds 0.60 of what it holds in eager PyTorch, 0.61 of inductor's" in words
    assert "1.0 s; inductor 20 s, eager 0.20 s" in words
    assert "over 2 [models]" in words
    assert "[raw figures](result.json)" in words
    assert "PyTorch 2.13.0 and 2 threads on a machine of 2 cores" in words
    assert page.endswith(f"{MARKS[1]}\nafter\n")
    for theme in ("light", "dark"):
        drawn = ElementTree.parse(pictures / f"training_step_{theme}.svg").getroot()
        assert drawn.tag.endswith("svg")

    # Once it is named, the result need not be given.
    assert run_script("--check", "--readme", readme).returncode == 0
    readme.write_text(page.replace("0.25", "0.24"))
    checked = run_script("--check", "--readme", readme)
    assert checked.returncode == 1
    assert "figures differ from those of" in checked.stderr


def test_disturbed_figures_say_so(result: Path, readme: Path, document: dict[str, Any]) -> None:
    run_script(result, "--readme", readme, "--pictures", result.parent)
    assert "Other processes" not in readme.read_text()
    document["records"][0]["foreign_cpu"] = [0.0, 0.31]
    result.write_text(json.dumps(document))
    run_script(result, "--readme", readme, "--pictures", result.parent)
    assert "Other processes used up to 31% of the machine" in " ".join(readme.read_text().split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "out of memory"}, "two, ort: failed: out of memory"),
        ({"refused": "no rule"}, "two, ort: eager PyTorch ran a part: no rule"),
        ({"memory": []}, "two, ort: not measured: step_peak"),
        (
            {"steady_counters": [{"ort": {"fallbacks": 1}}]},
            "two, ort: steady step: fallbacks: got 1, want 0",
        ),
    ],
    ids=["failed", "refused", "not measured", "fell back"],
)
def test_no_figures_of_a_run_that_does_not_count(
    result: Path, readme: Path, document: dict[str, Any], change: dict, words: str
) -> None:
    document["records"][5] |= change
    result.write_text(json.dumps(document))
    done = run_script(result, "--readme", readme)
    assert done.returncode == 1
    assert words in done.stderr
    assert "old figures" in readme.read_text()


def test_a_backend_is_missing(result: Path, readme: Path, document: dict[str, Any]) -> None:
    del document["records"][4]
    result.write_text(json.dumps(document))
    done = run_script(result, "--readme", readme)
    assert done.returncode == 1
    assert "two: no record of inductor" in done.stderr


def test_readme_says_what_its_result_says() -> None:
    done = run_script("--check")
    assert done.returncode == 0, done.stderr
