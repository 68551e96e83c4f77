# Two processes on gloo with a graph that communicates, where something goes wrong on one of them
# alone: the other one neither waits for ever nor goes on with other numbers.
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_faults
import torch
import torch.distributed as dist
from processes import run_script

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    script = Path(rank_faults.__file__).read_text()
    return run_script(script, folder, "2", name, ranks=2, timeout=120, TORCH_ORT_STRICT="0")


def test_all_run_in_eager_if_one_cannot_capture(tmp_path: Path) -> None:
    first, second = run("one_cannot_capture", tmp_path)
    for each in (first, second):
        assert each["error"] == ""
        torch.testing.assert_close(each["result"], torch.full((4,), 2.0).exp())
        assert each["counters"]["fallbacks"] == 1
        assert each["counters"]["forward_runs"] == 0
    (words,) = first["warnings"]
    assert "rank 1 of group '0' cannot capture this graph, so that all run it in eager" in words
    assert "failed at remove_dead" in words
    (words,) = second["warnings"]
    assert "failed at remove_dead" in words


def test_all_modules_run_in_eager_if_one_cannot_be_captured(tmp_path: Path) -> None:
    for each in run("one_module_cannot_be_captured", tmp_path):
        assert each["error"] == ""
        torch.testing.assert_close(each["result"], torch.full((4, 4), 0.5))
        assert each["counters"]["fallbacks"] == 1
        assert each["counters"]["forward_runs"] == 0
        (words,) = each["warnings"]
        assert "failed at remove_dead" in words


@pytest.mark.parametrize(
    "name",
    [
        "captured_differently",
        "modules_are_captured_differently",
        "branches_communicate_differently",
    ],
)
def test_different_collectives_are_an_error(name: str, tmp_path: Path) -> None:
    for rank, each in enumerate(run(name, tmp_path)):
        words = f"ranks of group '0': rank {rank} and others have captured graphs that "
        assert words + "communicate differently" in each["error"]


def test_one_captures_again_alone(tmp_path: Path) -> None:
    for rank, each in enumerate(run("one_captures_again", tmp_path)):
        assert each["error"] == ""
        want = torch.tensor([[4.0], [6.0]]).expand(2, 4)
        torch.testing.assert_close(each["result"], want)
        assert each["counters"]["graphs_captured"] == 1 + rank
        assert each["counters"]["fallbacks"] == 0


def test_one_captures_other_collectives_alone(tmp_path: Path) -> None:
    first, second = run("one_captures_alone", tmp_path)
    assert first["error"] == ""
    assert (
        "rank 1 captures a graph that communicates, and rank 0 does not within 0:00:10"
        in (second["error"])
    )
    assert "all ranks of a group must call the same compiled functions" in second["error"]


def test_one_dies(tmp_path: Path) -> None:
    first, _ = run("one_dies", tmp_path)
    assert first["kind"] in ("RuntimeError", "DistBackendError")
    assert first["warnings"] == []  # and nothing runs again in eager PyTorch


def test_a_module_that_fails_on_one_is_an_error_there(tmp_path: Path) -> None:
    first, second = run("a_module_fails_on_one", tmp_path)
    assert first["error"] == ""
    assert "failed at wait" in second["error"]
    assert second["warnings"] == []


def test_a_backward_that_fails_on_one_is_an_error_there(tmp_path: Path) -> None:
    first, second = run("backward_fails_on_one", tmp_path)
    assert first["error"] == ""
    assert "failed at region" in second["error"]
    assert second["warnings"] == []
