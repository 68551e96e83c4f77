# Two processes on gloo, between which a library has split a model: gradients are eager's.
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parallel_libraries
import pytest
import torch.distributed as dist
from parallel_libraries import CASES
from processes import run_script

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that gives what each rank has seen in a case."""

    @functools.cache
    def run(names: tuple[str, ...]) -> list[dict[str, Any]]:
        return run_script(
            Path(parallel_libraries.__file__).read_text(), tmp_path_factory.mktemp("ranks"),
            *names, ranks=2, timeout=300, TORCH_ORT_STRICT="0",
        )  # fmt: skip

    def find(name: str) -> list[dict[str, Any]]:
        return [of_rank[name] for of_rank in run(tuple(CASES) if name in CASES else (name,))]

    return find


def check_all_in_engine(found: list[dict[str, Any]], graphs: int, runs: int) -> None:
    for each in found:
        assert each["difference"] <= 1e-5
        assert each["warnings"] == []
        counters = each["counters"]
        assert counters["fallbacks"] == counters["graph_breaks"] == 0
        assert counters["graphs_captured"] == graphs
        assert counters["backward_runs"] == runs


@pytest.mark.hf
def test_transformers_by_plan(results_of) -> None:
    pytest.importorskip("transformers")
    found = results_of("transformers_by_plan")
    check_all_in_engine(found, graphs=1, runs=3)
    assert all(each["counters"]["collectives"] > 0 for each in found)


@pytest.mark.deepspeed
def test_deepspeed_by_size(results_of) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    found = results_of("deepspeed_by_size")
    check_all_in_engine(found, graphs=1, runs=3)
    assert all(each["counters"]["collectives"] > 0 for each in found)


def test_stages_of_a_pipeline(results_of) -> None:
    found = results_of("pipeline_of_stages")
    assert all(each["difference"] <= 1e-5 for each in found)
    for each in found:
        assert each["warnings"] == []
        assert each["counters"]["fallbacks"] == 0
        assert each["counters"]["backward_runs"] >= 4


def test_a_reducer_in_python_says_what_runs_where(results_of) -> None:
    for each in results_of("reducer_in_python"):
        assert each["difference"] <= 1e-5
        (words,) = each["warnings"]
        assert "compiled autograd: the graph calls a backward that the engine has compiled" in words
        assert each["counters"]["forward_runs"] == each["counters"]["backward_runs"] == 1
