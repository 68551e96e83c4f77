"""tests/versions/trial.py: what it reads of pytest's reports, and which parts it runs."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
from versions import trial

TESTS = """
    import pytest

    def test_right(record_property):
        record_property("left_to_eager", 2)

    @pytest.mark.parametrize("i", [1, 2])
    def test_wrong(i, record_property):
        record_property("left_to_eager", i)
        assert i == 2

    def test_skipped():
        pytest.skip()

    def test_expected():
        pytest.xfail()

    @pytest.fixture
    def broken():
        raise ValueError

    def test_error(broken):
        pass
"""


def test_what_came_of_tests_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TESTS))
    outcome = trial.run_tests("-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    assert outcome.passed == 2
    assert [name.partition("::")[2] for name in outcome.failed] == ["test_wrong[1]", "test_error"]
    assert (outcome.models, outcome.left_to_eager) == (3, 5)


def test_a_pytest_that_ends_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"pytest --no-such-option: exit status 4"):
        trial.run_tests("--no-such-option")


def outcomes(monkeypatch: pytest.MonkeyPatch, **failed: list[str]) -> list[tuple[str, ...]]:
    calls = []

    def run_tests(*arguments: str) -> trial.Outcome:
        part = "cuda" if "cuda" in arguments else "models" if trial.MODELS in arguments else "cpu"
        calls.append(arguments)
        return trial.Outcome({"cpu": 5, "models": 20, "cuda": 7}[part], failed.get(part, []), 20)

    monkeypatch.setattr(trial, "run_tests", run_tests)
    return calls


def run_main(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> tuple[int, dict]:
    arguments = ["--record", str(path), "--workers", "3", *options, "tests/a", "tests/b"]
    monkeypatch.setattr(sys, "argv", ["trial.py", *arguments])
    status = trial.main()
    return status, json.loads(path.read_text())


def test_a_record_has_all_parts(monkeypatch, tmp_path, capsys) -> None:
    calls = outcomes(monkeypatch)
    status, record = run_main(monkeypatch, tmp_path / "record.json")
    assert status == 0
    assert calls == [
        ("-n", "3", "tests/a", "tests/b"),
        ("-n", "3", "--run-slow", trial.MODELS),
        ("-n", "3", "-m", "cuda"),
    ]
    assert record["cpu"] == {"passed": 25, "failed": []}
    assert record["cuda_tests"] == {"passed": 7, "failed": []}
    assert (record["models"], record["left_to_eager"]) == (20, 0)
    assert record["torch"] in capsys.readouterr().out


def test_tests_of_cuda_can_be_left_out(monkeypatch, tmp_path) -> None:
    calls = outcomes(monkeypatch)
    status, record = run_main(monkeypatch, tmp_path / "record.json", "--without-cuda")
    assert status == 0
    assert len(calls) == 2
    assert record["cuda_tests"] is None


@pytest.mark.parametrize("part", ["cpu", "models", "cuda"])
def test_what_fails_is_named(part, monkeypatch, tmp_path, capsys) -> None:
    outcomes(monkeypatch, **{part: ["tests.a::test_one"]})
    status, record = run_main(monkeypatch, tmp_path / "record.json")
    assert status == 1
    assert record["cuda_tests" if part == "cuda" else "cpu"]["failed"] == ["tests.a::test_one"]
    assert ": 1 failed\n  tests.a::test_one\n" in capsys.readouterr().out
