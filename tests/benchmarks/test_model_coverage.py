"""Rows of the coverage table stay as good as they are, and failures are rows as well."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from own_process import run_python

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "coverage.json"
SCRIPT = ROOT / "benchmarks" / "model_coverage.py"
# Of several kinds, and quick to capture.
WATCHED = ("bert", "llama", "convnext", "dcgan", "graph_network")


@pytest.fixture
def scripts(monkeypatch):
    """Give modules of benchmarks/ by name; other tests have modules of the same names."""
    names = [path.stem for path in SCRIPT.parent.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("road", ["compile", "ortmodule"])
@pytest.mark.parametrize("name", WATCHED)
def test_nothing_that_the_table_has_is_lost(scripts, monkeypatch, name, road):
    if name in ("bert", "llama", "convnext"):
        pytest.importorskip("transformers")
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
    rows, worker = scripts("coverage_rows"), scripts("coverage_worker")
    kept = rows.load(KEPT)
    before, tolerance = kept.row(name, road), kept.tolerance(name)
    assert before.is_whole
    assert before.is_accurate(tolerance)
    now = replace(before, measured=worker.check(name, road))
    assert rows.lost(before, now, tolerance) == []


def test_what_is_lost_is_named(scripts):
    rows = scripts("coverage_rows")
    before = rows.load(KEPT).row("bert", "compile")

    def found(**changes):
        return rows.lost(before, replace(before, measured=before.measured | changes), 1e-4)

    assert found() == []
    (words,) = found(graphs=2, breaks=1, reasons=["a branch on data"])
    assert words.startswith("bert, compile: was captured whole: got {'graphs': 2, 'breaks': 1")
    assert "a branch on data" in words
    (words,) = found(fallbacks=1)
    assert "'fallbacks': 1" in words
    (words,) = found(loss_difference=0.5)
    assert words == "bert, compile: loss: differs by 5.0e-01 of eager's, want ≤ 1.0e-04"
    failed = replace(before, measured={}, error="no answer after 3 s")
    (words,) = rows.lost(before, failed, 1e-4)
    assert words == "bert, compile: failed: no answer after 3 s"
    assert rows.lost(failed, failed, 1e-4) == []


def test_a_sensitive_model_may_be_as_far_off_as_its_last_bits_make_it(scripts):
    rows = scripts("coverage_rows")
    ours = rows.Row("a", "vision", "compile", {"loss_difference": 2e-3})

    def kept(rounding):
        eager = rows.Row("a", "vision", "eager", {"rounding_difference": rounding})
        return rows.Coverage({}, [eager, ours])

    assert not ours.is_accurate(kept(1e-7).tolerance("a"))
    assert ours.is_accurate(kept(7e-3).tolerance("a"))
    assert rows.Coverage({}, [ours]).tolerance("a") == rows.LOSS_TOLERANCE


def test_the_page_shows_what_is_kept(scripts, tmp_path):
    rows, page = scripts("coverage_rows"), scripts("coverage_page")
    shown = ROOT / "docs" / "coverage.md"
    written = tmp_path / "coverage.md"
    written.write_text(shown.read_text())
    page.write_page(written, rows.load(KEPT))
    assert written.read_text() == shown.read_text()
    written.write_text("# A page without a table\n")
    with pytest.raises(ValueError, match="no lines '<!-- written by"):
        page.write_page(written, rows.load(KEPT))


def test_an_operator_computes_or_only_views(scripts):
    runs_kernel = scripts("coverage_worker").runs_kernel
    computing = ("aten::add", "aten::add_", "aten::mm", "aten::zeros", "aten::copy_", "aten::sum")
    assert all(map(runs_kernel, computing))
    views = ("aten::view", "aten::detach", "aten::t", "aten::empty", "aten::as_strided")
    assert not any(map(runs_kernel, views))


def test_a_job_that_fails_keeps_its_reason(tmp_path):
    """No process answers in so little time."""
    result, page = tmp_path / "result.json", tmp_path / "page.md"
    page.write_text("# Ours\n<!-- written by model_coverage.py -->\n<!-- until here -->\nEnd.\n")
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--models", "nerf", "--timeout", "0.01"),
            *("--json", str(result), "--page", str(page), "--against", str(KEPT)),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [row["road"] for row in rows] == ["eager", "compile", "ortmodule"]
    assert {row["error"] for row in rows} == {"no answer after 0.01 s"}
    text = page.read_text()
    assert text.startswith("# Ours\n")
    assert text.endswith("<!-- until here -->\nEnd.\n")
    assert "| nerf | generator | `ORTModule` | failed |" in text
    assert "- nerf, `torch.compile`: failed: `no answer after 0.01 s`" in text
    assert "lost: nerf, compile: failed: no answer after 0.01 s" in done.stdout


@pytest.mark.slow
def test_a_model_is_measured_on_both_roads(tmp_path):
    pytest.importorskip("transformers")  # whose version a result names
    result = tmp_path / "result.json"
    done = run_python(SCRIPT, "--models", "lstm_tagger", "--json", result)
    assert done.returncode == 0, done.stdout + done.stderr
    eager, compiled, module = json.loads(result.read_text())["rows"]
    for row in (eager, compiled, module):
        assert row["error"] is None
        assert row["measured"]["step_s"] > 0
    for row in (compiled, module):
        assert row["measured"]["breaks"] == 0
        # The two biases of a direction have one gradient, which autograd copies for the second one.
        assert row["measured"]["profile"]["eager_calls"] == 2
